"""Traces a GPU's work in a call: the time that kernels run, their number, and the time of the call without a trace.

    python -m scripts.benchmarks.gpu_trace > docs/results/gpu/trace.txt

Calls are training steps, by default and by waves without graphs, beside the stock model's; and new tokens of the 1.2 B
shape, for the stock model with and without cuDNN's attention. Copies and fills count as kernels. Kernels of several
streams that overlap count once in the busy time.
"""

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from condense.attention.sdpa import without_cudnn
from condense.eval.benchmark.cases import ModelVariant
from condense.eval.benchmark.models import build_model, cast_parameters, configure
from condense.eval.benchmark.timing import free_memory, seconds_of
from condense.eval.benchmark.workloads import decoding_step, random_ids, read_context, training_step
from condense.eval.results import Table

from .gpu.parts import CHECKPOINT_SEGMENTS
from .gpu.sizes import REAL

SEGMENT, REPEATS, LARGEST, NEW_TOKENS = 512, 7, 8, 60
WARM_UPS = 3  # a shape is captured the second time it is used
COLUMNS = ["call", "time [ms]", "device busy [ms]", "busy", "kernels", "a kernel [us]", "time a kernel [us]"]
FOLDED = ModelVariant(kind="folded", segment_length=SEGMENT)
VARIANTS = {
    "stock": ModelVariant(kind="stock"),
    "by default": replace(FOLDED, schedule="auto"),
    "waves without graphs": replace(FOLDED, schedule="wavefront"),
    "checkpointing, stock": ModelVariant(kind="stock", checkpointing=True),
    "checkpointing, by default": replace(
        FOLDED, schedule="auto", checkpointing=True, checkpoint_segments=CHECKPOINT_SEGMENTS
    ),
}
STEPS = (  # name, shape, texts, tokens of each
    ("Table I", REAL.table_1, 1, 2048),
    ("Table I", REAL.table_1, 1, 4096),
    ("Table I", REAL.table_1, 1, 16_384),
    ("1.2 B", REAL.large, 1, 8192),
    ("1.2 B", REAL.large, 8, 4096),
)
CONCATENATION = "CatArray"  # part of the names of torch's kernels


@dataclass(frozen=True)
class Kernel:
    """One kernel of a trace; times in microseconds."""

    name: str
    start: float
    end: float


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Returns the time in which at least one of the kernels runs."""
    total, reached = 0.0, -float("inf")
    for kernel in sorted(kernels, key=lambda one: one.start):
        total += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return total


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        seconds_of(call)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def row(name: str, seconds: float, kernels: Sequence[Kernel]) -> list[str]:
    busy, count = busy_us(kernels), max(len(kernels), 1)
    share, time_us = busy / (1e6 * seconds), 1e6 * seconds
    return [
        name, f"{1e3 * seconds:.2f}", f"{busy / 1e3:.2f}", f"{share:.0%}", f"{len(kernels):,}", f"{busy / count:.1f}",
        f"{time_us / count:.1f}",
    ]  # fmt: skip


def largest(kernels: Sequence[Kernel]) -> str:
    """Formats the kernels that take most of the time, with their number and their share of the sum."""
    times: dict[str, float] = defaultdict(float)
    counts = Counter[str]()
    for kernel in kernels:
        times[kernel.name] += kernel.end - kernel.start
        counts[kernel.name] += 1
    total = sum(times.values())
    return "\n".join(
        f"    {time / total:6.1%} {counts[name]:6,} x {name[:90]}"
        for name, time in sorted(times.items(), key=lambda item: -item[1])[:LARGEST]
    )


def concatenated(kernels: Sequence[Kernel]) -> float:
    """Returns the share of the kernels' time that concatenates tensors."""
    times = [(kernel.end - kernel.start, CONCATENATION in kernel.name) for kernel in kernels]
    return sum(time for time, copies in times if copies) / sum(time for time, _ in times)


def details(name: str, kernels: Sequence[Kernel]) -> str:
    return f"{name}: {concatenated(kernels):.1%} concatenations\n{largest(kernels)}"


def step_title(shape: str, texts: int, tokens: int) -> str:
    return f"training step, {shape} shape, {texts} x {tokens:,} tokens, segments of {SEGMENT}"


def _measured_step(variant: ModelVariant, shape: dict[str, Any], texts: int, length: int) -> tuple[float, list[Kernel]]:
    with torch.device("cuda"):
        model = cast_parameters(build_model(variant.kind, shape, SEGMENT, "sdpa"), torch.bfloat16)
    configure(model, variant)
    step = training_step(model, random_ids(model, texts, length))
    for _ in range(WARM_UPS):
        step()
    return statistics.median(seconds_of(step) for _ in range(REPEATS)), kernels_of(step)


def _steps() -> None:
    for shape_name, shape, texts, length in STEPS:
        rows, shares = [], []
        for name, variant in VARIANTS.items():
            try:
                seconds, kernels = _measured_step(variant, shape, texts, length)
            except torch.OutOfMemoryError:
                rows.append([name, "out of memory", *[""] * (len(COLUMNS) - 2)])
            else:
                rows.append(row(name, seconds, kernels))
                shares.append(details(name, kernels))
            free_memory()
        print(Table(step_title(shape_name, texts, length), COLUMNS, rows))
        print("\n".join(shares), flush=True)


def _tokens() -> None:
    """Traces new tokens. The folded model avoids cuDNN's kernel by itself. The first token has had no warm-up."""
    rows, lines = [], []
    for name in ("folded", "stock without cuDNN", "stock"):
        kind, *without = name.split(" without ")
        with torch.device("cuda"):
            model = cast_parameters(build_model(kind, REAL.large, SEGMENT, "sdpa"), torch.bfloat16)
        if kind == "folded":
            configure(model, replace(FOLDED, schedule="auto"))
        context_BN = random_ids(model, 1, REAL.decode_short)
        token = decoding_step(model, read_context(model, context_BN, REAL.decode_short)[0], context_BN[:, -1:])
        with without_cudnn() if without else nullcontext():
            seconds = [seconds_of(token) for _ in range(NEW_TOKENS)]
            rows.append(row(name, statistics.median(seconds), kernels_of(token)))
        lines.append(f"{name}: " + " ".join(f"{1e3 * one:.1f}" for one in seconds))
        del model, token
        free_memory()
    print(Table(f"new tokens, 1.2 B shape, after {REAL.decode_short:,} tokens", COLUMNS, rows))
    print("milliseconds of each token\n" + "\n".join(lines), flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_trace: there is no CUDA device.")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, bfloat16")
    _steps()
    _tokens()


if __name__ == "__main__":
    main()
