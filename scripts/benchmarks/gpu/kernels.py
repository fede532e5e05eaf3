"""Checks kernels and waits: FlashAttention's kernel runs without a mask, and no segment makes the host wait.

Waits once per call do not grow with the number of segments. Counted are waits that torch warns of, by the line that
causes them, and waits in the profiler's trace.

Axes: B rows, N tokens of an input.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from condense.eval.benchmark.cases import SCHEDULES, ModelVariant
from condense.eval.benchmark.models import cast_parameters, configure, folded_variants
from condense.eval.benchmark.timing import synchronize
from condense.eval.benchmark.workloads import WHOLE_TEXT_WORKLOADS, random_ids

from .reference import reference_model
from .session import Session, build_models
from .sizes import TINY

SEGMENT = 16
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH", "Memcpy HtoD")


def kernels(session: Session) -> None:
    """Checks kernels and waits. A wait costs speed but changes no result: it fails this part, and later parts run."""
    _flash(session)
    _waits_by_segments(session)


def _waits_by_segments(session: Session) -> None:
    counts = session.sizes.waits_segments
    model = build_models(session, TINY, ["folded"])["folded"]
    for variant in folded_variants([SEGMENT]):
        configure(model, variant)
        for mode, workload in WHOLE_TEXT_WORKLOADS.items():
            warned, traced = [], []
            for count in counts:
                call = workload(model, random_ids(model, 2, count * SEGMENT))
                call()  # loads kernels and fills the allocator
                warned.append(_warnings(session, call))
                traced.append(_waits(session, call))
            note = f"{counts[0]} segments: {_counts(warned[0])}; {counts[1]}: {_counts(warned[1])}"
            note += f"; trace: {_counts(traced[0])}; {_counts(traced[1])}"
            few, many = (sum(counter.values()) for counter in warned)
            grew = many > few or any(traced[1][name] > traced[0][name] for name in WAITS if name != "Memcpy HtoD")
            passed = None if session.device.type != "cuda" else not grew
            session.check(f"{mode}, {variant.schedule}: waits do not grow with segments", passed, note)


def _warnings(session: Session, call: Callable[[], object]) -> Counter[str]:
    """Counts waits by file and line."""
    if session.device.type != "cuda":
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


def _waits(session: Session, call: Callable[[], object]) -> Counter[str]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (session.device.type == "cuda")
    with profile(activities=activities) as trace:
        call()
        synchronize()
    return Counter(wait for name in _names(trace) for wait in WAITS if name.startswith(wait))


def _names(trace: profile) -> list[str]:
    """Returns the names of all events; `trace.events()` would take seconds to build a tree of them."""
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    return [event.name() for event in trace.profiler.kineto_results.events()]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counter.most_common()) or "none"


def _flash(session: Session) -> None:
    """Checks that SDPA with a lower-right causal mask runs only in the flash kernel, forward and backward."""
    name = "sdpa, bfloat16: lower-right causal attention in the flash kernel"
    if session.device.type != "cuda":
        session.check(name, None, "there is no CUDA")
        return
    shape, segment = list(session.sizes.checked.values())[-1]
    model = cast_parameters(reference_model(shape, segment).to(session.device), torch.bfloat16)
    for schedule in SCHEDULES:
        configure(model, ModelVariant(kind="folded", segment_length=segment, schedule=schedule))
        ids_BN = random_ids(model, 1, 4 * segment)
        with profile(activities=[ProfilerActivity.CUDA]) as trace, sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            try:
                model.train()(input_ids=ids_BN, labels=ids_BN).loss.backward()
                synchronize()
            except RuntimeError as error:
                session.check(f"{name}, {schedule}", False, f"refused: {str(error)[:300]}")
                continue
        found = sorted({kernel[:80] for kernel in _names(trace) if "flash" in kernel.lower()})
        session.check(f"{name}, {schedule}", bool(found), "kernels: " + ("; ".join(found) or "none"))
