"""The schedules of a folded model side by side, and whether `schedule="auto"` takes the faster one.

Each point is measured in a process of its own, in which the schedules run in turn, repeat by repeat: what drifts
drifts for both.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..records import Records
from ..results import Table, circumstances, hardware, picture, versions, write_results
from .point import Point, Setting, place, prefill, timed, times, training_step
from .run import DEFAULTS, given, grid, in_a_process
from .show import token_axis

CALLS: dict[str, Callable[[Any, Point], Callable[[], Any]]] = {"training": training_step, "prefill": prefill}
SCHEDULES = ("sequential", "wavefront")
NEARLY = 1.05  # how much longer than the better one what is chosen may take


def measure(point: Point, setting: Setting) -> dict[str, Any]:
    """Each schedule's seconds, and what "auto" takes, in this process. What doesn't fit: `out_of_memory`."""
    import torch

    from .memory import is_out_of_memory, memory_of
    from .shapes import build

    device, dtype = place(setting)
    memory_of(device)  # on a CPU it sees to it that what doesn't fit is refused
    torch.manual_seed(0)
    model = build("folded", setting.shape, point.segment_length, point.attention)
    figures: dict[str, Any] = {"parameters": model.num_parameters(), "dtype": dtype, "out_of_memory": False}
    try:
        return figures | race(model.to(device, getattr(torch, dtype)), point, setting.repeats)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return figures | {"out_of_memory": True}


def race(model: Any, point: Point, repeats: int) -> dict[str, Any]:
    """After a warm-up of each; `times` holds the seconds of every repeat."""
    call = CALLS[point.mode](model, point)
    figures: dict[str, Any] = {"auto": taken_by_auto(model, point)}
    taken: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    for _ in range(1 + repeats):
        for schedule, seconds in taken.items():
            model.config.schedule = schedule
            seconds.append(timed(call))
    for schedule, seconds in taken.items():
        figures |= {f"{schedule}_{name}": value for name, value in times(seconds[1:]).items()}
    return figures | {"times": {schedule: seconds[1:] for schedule, seconds in taken.items()}}


def taken_by_auto(model: Any, point: Point) -> str:
    """The model's own question, for whole texts of one length."""
    from condense.memory import TransientMemory
    from condense.schedule import choose_schedule

    cursor = TransientMemory(point.batch, model.config).cursor
    return choose_schedule(model.config, model.model.layers, [point.length] * point.batch, cursor, point.checkpointing)


def schedules(
    output: Path,
    shape: str = "table1",
    modes: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
    attentions: Sequence[str] | None = None,
    vocab_size: int | None = None,
    dtype: str = "auto",
    repeats: int = 3,
) -> dict[str, Any]:
    """Measures every combination and writes output/schedules.*; arguments are as for `profile`.

    Without gradient checkpointing, under which "auto" is sequential at any size, to save memory. Stopped and called
    again with the same arguments, it goes on. Raises `ValueError` for what can't be measured.
    """
    import torch

    from .shapes import shape_of

    options = {"modes": modes, "lengths": lengths, "batches": batches, "segments": segments, "attentions": attentions}
    chosen = given(DEFAULTS | {"modes": tuple(CALLS)}, **options)
    if wrong := [mode for mode in chosen["modes"] if mode not in CALLS]:
        raise ValueError(
            f"modes={wrong}: schedules differ where several segments are read in one call, so choose from "
            f"{', '.join(CALLS)}."
        )
    points = list(grid(("folded",), **chosen))
    setting = Setting(shape_of(shape, vocab_size), dtype, repeats, None)
    settings = {**asdict(setting), "hardware": hardware(), "torch": versions()["torch"]}
    settings |= {"threads": torch.get_num_threads()}
    records = Records(output / "schedules.records.jsonl", settings)
    measured = []
    bar = tqdm(points, unit="point", desc="schedules")
    for point in bar:
        key = asdict(point)
        bar.set_postfix_str(f"{point.mode} {point.length:,} segment {point.segment_length}")
        record = records.get(key, lambda point=point: in_a_process("schedules", point, setting))
        measured.append({**key, **record})
    results = {"kind": "schedules", **circumstances(), **settings, "points": measured}
    write_results(output / "schedules", results, measured)
    draw(results, output / "schedules")
    return results


def ratio(point: dict[str, Any]) -> float:
    """How much faster the wave is."""
    return point["sequential_seconds"] / point["wavefront_seconds"]


def excess(point: dict[str, Any]) -> float:
    """The time of what "auto" takes over the better one's: 1 where it is right."""
    return point[f"{point['auto']}_seconds"] / min(point[f"{schedule}_seconds"] for schedule in SCHEDULES)


def groups(results: dict[str, Any], *names: str) -> list[list[dict[str, Any]]]:
    """Points that agree in these fields."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in results["points"]:
        found.setdefault(json.dumps([point[name] for name in names]), []).append(point)
    return list(found.values())


def tables(results: dict[str, Any]) -> list[Table]:
    """A table for each implementation of attention, whose title counts where "auto" is right."""
    times_columns = [f"{schedule} [ms] (lowest to highest)" for schedule in SCHEDULES]
    columns = ["tokens", "segment", "batch", "mode", *times_columns, "sequential / wavefront", "auto takes"]
    columns += ["auto's time / the better one's"]
    made = []
    for points in groups(results, "attention"):
        rows = []
        for point in points:
            row = [f"{point['length']:,}", point["segment_length"], point["batch"], point["mode"]]
            if point["out_of_memory"]:
                rows.append([*row, "OOM", *[""] * 4])
                continue
            row += [_milliseconds(point, schedule) for schedule in SCHEDULES]
            rows.append([*row, f"{ratio(point):.2f}", point["auto"], f"{excess(point):.2f}"])
        fitting = [point for point in points if not point["out_of_memory"]]
        right = sum(excess(point) <= NEARLY for point in fitting)
        title = (
            f"schedules, attention {points[0]['attention']}: auto is within {NEARLY - 1:.0%} of the better one in "
            f"{right} of {len(fitting)} points"
        )
        made.append(Table(title, columns, rows))
    return made


def _milliseconds(point: dict[str, Any], schedule: str) -> str:
    middle, low, high = (f"{1000 * point[f'{schedule}_seconds{end}']:,.1f}" for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel per mode, attention and batch: how much faster the wave is, against length."""
    rows = groups(results, "mode", "attention")
    batches = sorted({point["batch"] for point in results["points"]})
    segments = sorted({point["segment_length"] for point in results["points"]})
    size = (4.2 * len(batches), 3 * len(rows))
    options = {"figsize": size, "squeeze": False, "sharey": "row"}
    with picture(path, rows=len(rows), columns=len(batches), **options) as panels:
        for line, points in zip(panels, rows, strict=True):
            for axes, batch in zip(line, batches, strict=True):
                for number, segment in enumerate(segments):
                    mine = [p for p in points if (p["batch"], p["segment_length"]) == (batch, segment)]
                    _curve(axes, mine, f"segment {segment}", f"C{number}")
                axes.axhline(1, color="black", linewidth=0.8)
                token_axis(axes, results["points"])
                axes.set_title(f"{points[0]['mode']}, batch {batch}, {points[0]['attention']}", fontsize=9)
                axes.grid(alpha=0.3)
            line[0].set_ylabel("sequential / wavefront\n(filled: auto takes the wave)", fontsize=8)
        panels[0][0].legend(fontsize=7)


def _curve(axes: Any, points: list[dict[str, Any]], label: str, color: str) -> None:
    points = sorted((point for point in points if not point["out_of_memory"]), key=lambda point: point["length"])
    axes.plot([point["length"] for point in points], list(map(ratio, points)), color=color, label=label, linewidth=1.2)
    for point in points:
        fill = color if point["auto"] == "wavefront" else "white"
        axes.plot(point["length"], ratio(point), "o", color=color, markerfacecolor=fill, ms=6)
