"""The ratios to reach on an H200, and the ratios of the measured points.

A ratio compares two points, each the best of its kind: the stock model with its best attention, and the folded model
with its best segment length and schedule. Both have the same gradient checkpointing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from condense.eval.results import Table

from .comparison import variant_name
from .sizes import Sizes

LONGEST_BAR = 8

Condition = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Bar:
    """A ratio to reach: among the points of a row, the best `figure` that meets `above` over the best that meets
    `below`."""

    name: str
    bar: float
    stretch: float
    row: str
    figure: str
    above: Condition
    below: Condition
    at_least: bool = True  # or at most


def bars(sizes: Sizes) -> list[Bar]:
    def has(**fields: Any) -> Condition:
        return lambda point: all(point.get(name) == value for name, value in fields.items())

    stock, ours = has(kind="stock"), has(kind="folded")
    found = []
    for suffix, words in (("", ""), (", checkpointing", ", checkpointing on both sides")):
        found += [
            Bar(f"training memory, Table I shape, eager, {sizes.training_eager:,}{words}: stock / folded",
                4.33, 8, f"training memory, eager{suffix}", "peak_bytes", stock, ours),
            Bar(f"training memory, Table I shape, flash, {sizes.training_memory:,}{words}: stock / folded",
                1.77, 4, f"training memory{suffix}", "peak_bytes", stock, ours),
        ]  # fmt: skip
        for length, bar, stretch in zip(sizes.training_steps, (1.68, 1.0), (2.5, 1.3), strict=True):
            found.append(
                Bar(f"training step, Table I shape, flash, {length:,}{words}: stock / folded time",
                    bar, stretch, f"training {length:,}{suffix}", "seconds", stock, ours)
            )  # fmt: skip
    found += [
        Bar(f"prefill, 1.2 B shape, segment {sizes.segment}, {sizes.prefill_schedules:,}: sequential / wavefront",
            2.7, 3.5, "prefill", "seconds", has(schedule="sequential"), has(schedule="wavefront")),
        Bar(f"prefill, 1.2 B shape, {sizes.prefill_full:,}: full attention / folded",
            3.3, 6, "prefill, full", "seconds", stock, ours),
    ]  # fmt: skip
    found += [
        Bar(f"decoding, {words}1.2 B shape, batch {batch}: a token at {length:,} over at {sizes.decode_short:,}",
            1.05, 1.0, f"{row}, batch {batch}", "seconds",
            has(kind="folded", length=length), has(kind="folded", length=sizes.decode_short), at_least=False)
        for row, words in (("decoding, graph", "by a graph, "), ("decoding", ""))
        for batch, length in sizes.decode_long.items()
    ]  # fmt: skip
    name = "longest training text, 1.2 B shape, checkpointing on both sides: folded / stock"
    return [*found, Bar(name, LONGEST_BAR, 32, "longest training text", "longest", ours, stock)]


def judge(sizes: Sizes, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns each bar with the measured ratio; None if a point is missing or did not fit into memory."""
    return [_judge(bar, [point for point in points if point["row"] == bar.row]) for bar in bars(sizes)]


def _judge(bar: Bar, points: list[dict[str, Any]]) -> dict[str, Any]:
    verdict: dict[str, Any] = {"what": bar.name, "bar": bar.bar, "stretch": bar.stretch, "measured": None, "of": ""}
    best = []
    for condition in (bar.above, bar.below):
        candidates = [point for point in points if condition(point)]
        fitting = [point for point in candidates if point.get(bar.figure) is not None]
        if not fitting:
            return verdict | {"met": "OOM" if candidates else "unmeasured"}
        best.append((max if bar.figure == "longest" else min)(fitting, key=lambda point: point[bar.figure]))
    ratio = best[0][bar.figure] / best[1][bar.figure]
    reached = [ratio >= goal if bar.at_least else ratio <= goal for goal in (bar.bar, bar.stretch)]
    met = "stretch" if reached[1] else "yes" if reached[0] else "no"
    names = " / ".join(variant_name(point) for point in best)
    if bar.figure == "longest":
        names, met = _of_limits(names, met, *best)
    return verdict | {"measured": ratio, "of": names, "met": met}


def _of_limits(names: str, met: str, ours: dict[str, Any], stock: dict[str, Any]) -> tuple[str, str]:
    """Qualifies a ratio of lengths: if the time was over before the memory was full, a length is a lower bound."""
    if stock["failed"] is None:
        return f"{names}; the stock model's limit was not reached", "unknown"
    if ours["failed"] is None:
        return f"{names}; at least: the folded model's limit was not reached", "unknown" if met == "no" else met
    return names, met


def table(verdicts: list[dict[str, Any]]) -> Table:
    rows = [
        [
            verdict["what"],
            f"{verdict['bar']:g}",
            f"{verdict['stretch']:g}",
            "" if verdict["measured"] is None else f"{verdict['measured']:.3f}",
            verdict["met"],
        ]
        for verdict in verdicts
    ]
    return Table("bars", ["what", "bar", "stretch", "measured", "met?"], rows)
