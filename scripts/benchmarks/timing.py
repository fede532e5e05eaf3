"""Times calls, for studies of single operations on a CPU."""

import statistics
from collections.abc import Callable, Mapping

from condense.eval.benchmark.timing import seconds_of


def medians_in_turn(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each call after a warm-up. The calls take turns in every repeat."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            taken[name].append(seconds_of(call))
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
