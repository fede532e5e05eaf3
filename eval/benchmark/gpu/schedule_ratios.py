"""The schedules against each other, and what `schedule="auto"` takes: the measurements that its rule is fitted to."""

from typing import Any

from condense import CondenseConfig
from condense.execution.selection import faster_as_wave

from ...results import Table
from ..cases import SCHEDULES
from ..schedule_tables import TOLERANCE

COLUMNS = ["what", "sequential [ms]", "wavefront [ms]", "graph [ms]", "sequential / wavefront", "sequential / graph"]
COLUMNS += ["auto takes", "its time / the better one's"]
ITEM_BYTES = 2  # the rule does not ask for it on a GPU


def schedule_ratios(points: list[dict[str, Any]]) -> Table:
    """The times of the schedules and their ratios, for every row of the part `schedules`.

    The rule chooses between `sequential` and `wavefront`; `graph` is not in the last column.
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


def _choice(point: dict[str, Any]) -> str:
    config = CondenseConfig(num_hidden_layers=point["layers"], segment_length=point["segment_length"])
    num_segments = point["length"] // point["segment_length"]
    return SCHEDULES[faster_as_wave(config, num_segments, point["batch"], "cuda", ITEM_BYTES)]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.2f}"
