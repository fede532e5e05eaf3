"""Tables and picture of schedules and attentions side by side, with the choices of "auto"."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..results import Table, picture
from ..tables import select
from .cases import SCHEDULES
from .tables import group_by, token_axis

TOLERANCE = 1.05  # how many times the fastest choice's time "auto" may take


def ratio(point: dict[str, Any], names: Sequence[str] = SCHEDULES) -> float:
    """Returns how many times as fast the second is as the first: the wavefront as the sequential schedule."""
    return point[f"{names[0]}_seconds"] / point[f"{names[1]}_seconds"]


def excess(point: dict[str, Any], names: Sequence[str] = SCHEDULES, chosen: str = "auto") -> float:
    """Returns the time of auto's choice over the fastest choice's: 1 if auto is right."""
    return point[f"{point[chosen]}_seconds"] / min(point[f"{name}_seconds"] for name in names)


def tables(results: dict[str, Any]) -> list[Table]:
    """Returns tables of schedules under each attention, then of attentions. Titles count auto's right choices."""
    made = []
    for shared, points in group_by(results["points"], "attention"):
        made.append(_table(f"schedules, attention {shared['attention']}", points, SCHEDULES, "auto"))
    first = results["points"][0]["attention"]  # implementations are compared regardless of the option
    everywhere = [p for p in results["points"] if "auto_attention" in p and p["attention"] == first]
    names = [name for point in everywhere[:1] for name in point["times"] if name not in SCHEDULES]
    if len(names) > 1:
        made.append(_table("attention, under the schedule that auto takes", everywhere, names, "auto_attention"))
    return made


def _table(title: str, points: list[dict[str, Any]], names: Sequence[str], chosen: str) -> Table:
    columns = ["tokens", "segment", "batch", "mode", *[f"{name} [ms] (lowest to highest)" for name in names]]
    columns += [" / ".join(names[:2]), "auto takes", "auto's time / the best one's"]
    rows, right, fitting = [], 0, 0
    for point in points:
        row = [f"{point['length']:,}", point["segment_length"], point["batch"], point["mode"]]
        if point["out_of_memory"]:
            rows.append([*row, "OOM", *[""] * (len(names) + 2)])
            continue
        found = excess(point, names, chosen)
        fitting, right = fitting + 1, right + (found <= TOLERANCE)
        row += [_milliseconds(point, name) for name in names]
        rows.append([*row, f"{ratio(point, names):.2f}", point[chosen], f"{found:.2f}"])
    title += f": auto is within {TOLERANCE - 1:.0%} of the best one in {right} of {fitting} points"
    return Table(title, columns, rows)


def _milliseconds(point: dict[str, Any], name: str) -> str:
    middle, low, high = (f"{1000 * point[f'{name}_seconds{end}']:,.1f}" for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a panel per mode, attention and batch: sequential / wavefront against length."""
    rows = group_by(results["points"], "mode", "attention")
    batches = sorted({point["batch"] for point in results["points"]})
    segments = sorted({point["segment_length"] for point in results["points"]})
    size = (4.2 * len(batches), 3 * len(rows))
    options = {"figsize": size, "squeeze": False, "sharey": "row"}
    with picture(path, rows=len(rows), columns=len(batches), **options) as panels:
        for line, (shared, points) in zip(panels, rows, strict=True):
            for axes, batch in zip(line, batches, strict=True):
                for number, segment in enumerate(segments):
                    mine = select(points, batch=batch, segment_length=segment, out_of_memory=False)
                    _curve(axes, mine, f"segment {segment}", f"C{number}")
                axes.axhline(1, color="black", linewidth=0.8)
                token_axis(axes, results["points"])
                axes.set_title(f"{shared['mode']}, batch {batch}, attention {shared['attention']}", fontsize=9)
                axes.grid(alpha=0.3)
            line[0].set_ylabel("sequential / wavefront\n(filled: auto takes the wavefront)", fontsize=8)
        panels[0][0].legend(fontsize=7)


def _curve(axes: Any, points: list[dict[str, Any]], label: str, color: str) -> None:
    points = sorted(points, key=lambda point: point["length"])
    axes.plot([point["length"] for point in points], list(map(ratio, points)), color=color, label=label, linewidth=1.2)
    for point in points:
        fill = color if point["auto"] == "wavefront" else "white"
        axes.plot(point["length"], ratio(point), "o", color=color, markerfacecolor=fill, ms=6)
