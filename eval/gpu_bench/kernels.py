"""What runs on the device: FlashAttention's kernel without a mask, and no segment that makes the host wait.

Waits that happen once a call do not grow with segments. Counted are those that torch warns of, by the line that
causes them, and those in the profiler's trace.

Axes: B rows, N tokens.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from .correctness import reference_model
from .race import MODES, Bench, Variant, build_models, cast, configure, folded, schedules, synchronize
from .sizes import TINY

SEGMENT = 16
SEGMENTS = (8, 32)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH", "Memcpy HtoD")


def kernels(bench: Bench) -> None:
    """A wait is a matter of speed: it fails this part, and what is measured after it is worth having."""
    _flash(bench)
    _waits_by_segments(bench)


def _waits_by_segments(bench: Bench) -> None:
    model = build_models(bench, TINY, ["folded"])["folded"]
    for variant in folded([SEGMENT]):
        configure(model, variant)
        for mode, run in MODES.items():
            warned, traced = [], []
            for count in SEGMENTS:
                call = partial(run, model, bench.random_ids(model, 2, count * SEGMENT))
                call()  # kernels are loaded and the allocator is filled
                warned.append(_warnings(bench, call))
                traced.append(_waits(bench, call))
            note = f"{SEGMENTS[0]} segments: {_words(warned[0])}; {SEGMENTS[1]}: {_words(warned[1])}"
            note += f"; trace: {_words(traced[0])}; {_words(traced[1])}"
            few, many = (sum(counter.values()) for counter in warned)
            grew = many > few or any(traced[1][name] > traced[0][name] for name in WAITS if name != "Memcpy HtoD")
            passed = None if bench.device.type != "cuda" else not grew
            bench.check(f"{mode}, {variant.schedule}: waits do not grow with segments", passed, note)


def _warnings(bench: Bench, call: Callable[[], object]) -> Counter[str]:
    """Waits by file and line."""
    if bench.device.type != "cuda":
        call()
        return Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    causes = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    return Counter(f"{Path(cause.filename).parent.name}/{Path(cause.filename).name}:{cause.lineno}" for cause in causes)


def _waits(bench: Bench, call: Callable[[], object]) -> Counter[str]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (bench.device.type == "cuda")
    with profile(activities=activities) as trace:
        call()
        synchronize(bench)
    return Counter(wait for name in _names(trace) for wait in WAITS if name.startswith(wait))


def _names(trace: profile) -> list[str]:
    """Of all events; `trace.events()` would build a tree of them, for seconds."""
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    return [event.name() for event in trace.profiler.kineto_results.events()]


def _words(counter: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counter.most_common()) or "none"


def _flash(bench: Bench) -> None:
    """SDPA with a lower-right causal mask runs in the flash kernel, forward and backward, and in no other."""
    name = "sdpa, bfloat16: lower-right causal attention in the flash kernel"
    if bench.device.type != "cuda":
        bench.check(name, None, "there is no CUDA")
        return
    shape, segment = list(bench.sizes.checked.values())[-1]
    model = cast(reference_model(shape, segment).to(bench.device), torch.bfloat16)
    for schedule in schedules()[0]:
        configure(model, Variant("folded", "sdpa", segment, schedule))
        ids_BN = bench.random_ids(model, 1, 4 * segment)
        with profile(activities=[ProfilerActivity.CUDA]) as trace, sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            try:
                model.train()(input_ids=ids_BN, labels=ids_BN).loss.backward()
                synchronize(bench)
            except RuntimeError as error:
                bench.check(f"{name}, {schedule}", False, f"refused: {str(error)[:300]}")
                continue
        found = sorted({kernel[:80] for kernel in _names(trace) if "flash" in kernel.lower()})
        bench.check(f"{name}, {schedule}", bool(found), "kernels: " + ("; ".join(found) or "none"))
