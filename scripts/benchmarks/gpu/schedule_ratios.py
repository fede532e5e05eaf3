"""Compares the schedules with each other and with the choice of `schedule="auto"`, whose rule is fitted to them."""

from pathlib import Path
from typing import Any

from condense import CondenseConfig
from condense.eval.benchmark.cases import SCHEDULES
from condense.eval.benchmark.schedule_tables import TOLERANCE
from condense.eval.benchmark.tables import group_by, token_axis
from condense.eval.results import Table, picture, set_log_scale
from condense.execution.selection import faster_as_wave

COLUMNS = ["what", "sequential [ms]", "wavefront [ms]", "graph [ms]", "sequential / wavefront", "sequential / graph"]
COLUMNS += ["auto takes", "its time / the better one's"]
LINES = {"sequential": ":", "wavefront": "-", "graph": "--"}
ITEM_BYTES = 2  # on a GPU the rule does not use it


def schedule_ratios(points: list[dict[str, Any]]) -> Table:
    """Returns the times of the schedules and their ratios, for every row of the part `schedules`.

    The rule chooses between `sequential` and `wavefront`, so the last column does not compare with `graph`.
    """
    rows, right, judged = [], 0, 0
    for name in dict.fromkeys(point["row"] for point in points if point["row"].startswith("schedules")):
        measured = {point["schedule"]: point for point in points if point["row"] == name}
        seconds = {schedule: point.get("seconds") for schedule, point in measured.items()}
        sequential, wavefront, graph = (seconds.get(schedule) for schedule in ("sequential", "wavefront", "graph"))
        ratios = [f"{sequential / other:.2f}" if sequential and other else "" for other in (wavefront, graph)]
        verdict = ["", ""]
        if sequential and wavefront:
            taken = _choice(measured["sequential"])
            over = seconds[taken] / min(sequential, wavefront)
            judged, right = judged + 1, right + (over <= TOLERANCE)
            verdict = [taken, f"{over:.2f}{'!' if over > TOLERANCE else ' '}"]
        times = [_milliseconds(one) for one in (sequential, wavefront, graph)]
        rows.append([name.removeprefix("schedules, "), *times, *ratios, *verdict])
    counted = f"within {TOLERANCE - 1:.0%} of the better of two in {right} of {judged} points (! the others)"
    return Table(f"schedules; auto's choice is {counted}", COLUMNS, rows)


def is_drawable(points: list[dict[str, Any]]) -> bool:
    """Whether a point of the part `schedules` fitted into memory."""
    return any(map(_is_timed, points))


def _is_timed(point: dict[str, Any]) -> bool:
    return point["row"].startswith("schedules") and not point["out_of_memory"]


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Draws tokens a second by length: a panel for each mode and shape, a colour for each segment length, a line style
    for each schedule."""
    points = [point for point in points if _is_timed(point)]
    modes, shapes = group_by(points, "mode"), group_by(points, "hidden_size", "layers")
    segments = sorted({point["segment_length"] for point in points})
    size = (4.2 * len(shapes) + 1.8, 3.2 * len(modes))
    with picture(path, rows=len(modes), columns=len(shapes), squeeze=False, figsize=size) as panels:
        for line, (mode, _) in zip(panels, modes, strict=True):
            for axes, (shape, _) in zip(line, shapes, strict=True):
                here = [point for point in points if (mode | shape).items() <= point.items()]
                for (curve, found), label in ((group, _label(group[0])) for group in _curves(here)):
                    color = f"C{segments.index(curve['segment_length'])}"
                    rates = [point["length"] / point["seconds"] for point in found]
                    style = {"color": color, "linestyle": LINES[curve["schedule"]], "linewidth": 1.3, "markersize": 4}
                    axes.plot([point["length"] for point in found], rates, marker="o", label=label, **style)
                set_log_scale(axes, "y")
                token_axis(axes, here)
                axes.set_title(f"{mode['mode']}, {shape['layers']} layers of width {shape['hidden_size']}", fontsize=9)
                axes.grid(alpha=0.3)
            line[0].set_ylabel("tokens a second", fontsize=8)
        handles = panels[0][0].get_legend_handles_labels()
        panels[0][0].figure.legend(*handles, fontsize=7, loc="outside right upper", handlelength=3.5)


def _curves(points: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    return group_by(sorted(points, key=lambda point: point["length"]), "segment_length", "schedule")


def _label(curve: dict[str, Any]) -> str:
    return f"segments of {curve['segment_length']}, {curve['schedule']}"


def _choice(point: dict[str, Any]) -> str:
    config = CondenseConfig(num_hidden_layers=point["layers"], segment_length=point["segment_length"])
    num_segments = point["length"] // point["segment_length"]
    return SCHEDULES[faster_as_wave(config, num_segments, point["batch"], "cuda", ITEM_BYTES)]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.2f}"
