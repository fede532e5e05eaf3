"""Seconds and peak memory of one call, or of several in turn."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .memory import PeakMemory, or_out_of_memory
from .models import parameter_bytes

Call = Callable[[], object]


def seconds_of(call: Call) -> float:
    """Times a call until the device has finished."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def attempt(call: Call) -> float | None:
    """Like `seconds_of`, but returns None for a call that does not fit into memory."""
    return or_out_of_memory({}, lambda: {"seconds": seconds_of(call)}).get("seconds")


def summarize(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns the median, the lowest and the highest."""
    return {
        "seconds": statistics.median(seconds),
        "seconds_low": min(seconds),
        "seconds_high": max(seconds),
        "repeats": len(seconds),
    }


@dataclass(frozen=True)
class Contender:
    """A call that is measured in turn with others.

    `prepare` runs before each call and is not timed: contenders that share a model select their variant there.
    """

    model: Any
    call: Call
    prepare: Call


class Sample(NamedTuple):
    seconds: float
    peak_bytes: int


def measure_in_turn(
    contenders: Sequence[Contender],
    memory: PeakMemory,
    repeats: int,
    warm_ups: int = 1,
    has_time: Callable[[float], bool] = lambda seconds: True,
) -> list[list[Sample]]:
    """Returns each contender's samples. They take turns in every repeat, so a drift of the machine affects all.

    A contender that does not fit into memory in its warm-up has no samples. Before each further repeat, `has_time` is
    called with the seconds of the last one.
    """
    fits = [all(sample(contender, memory) is not None for _ in range(warm_ups)) for contender in contenders]
    taken: list[list[Sample]] = [[] for _ in contenders]
    for repeat in range(repeats):
        start = time.monotonic()
        for contender, fitted, samples in zip(contenders, fits, taken, strict=True):
            if fitted and (found := sample(contender, memory)) is not None:
                samples.append(found)
        if repeat + 1 < repeats and not has_time(time.monotonic() - start):
            break
    return taken


def sample(contender: Contender, memory: PeakMemory) -> Sample | None:
    """Returns seconds and peak, on CUDA without other contenders' bytes; None if the call does not fit into memory."""
    contender.prepare()
    on_cuda = contender.model.device.type == "cuda"
    of_others = memory.now() - parameter_bytes(contender.model) if on_cuda else 0
    memory.restart()
    seconds = attempt(contender.call)
    peak_bytes = memory.peak() - of_others
    contender.model.zero_grad(set_to_none=True)
    if seconds is None:
        free_memory()
        return None
    return Sample(seconds, peak_bytes)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Returns the memory of dropped tensors to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
