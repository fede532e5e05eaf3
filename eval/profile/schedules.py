"""The schedules and attentions of a folded model side by side, and whether "auto" takes the faster ones.

Each point is measured in a process of its own, in which the schedules run in turn, repeat by repeat: what drifts
drifts for both. Then so do the implementations of attention, under the schedule that "auto" takes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from condense.checks import check_attention, check_dtype

from ..results import Table, hardware, picture, run_metadata, versions, write_results
from ..results_store import open_results_store
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
    schedule, attention = taken_by_auto(model, point)
    set_schedule = partial(setattr, model.config, "schedule")
    taken = _in_turn(call, {name: partial(set_schedule, name) for name in SCHEDULES}, repeats)
    set_schedule(schedule)
    attentions: dict[str, Callable[[], Any]] = {
        name: partial(model.set_attn_implementation, name) for name in attentions_of(model)
    }
    taken |= _in_turn(call, attentions, repeats)
    figures: dict[str, Any] = {"auto": schedule, "auto_attention": attention}
    for variant, seconds in taken.items():
        figures |= {f"{variant}_{name}": value for name, value in times(seconds).items()}
    return figures | {"times": taken}


def _in_turn(call: Callable[[], Any], variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 + repeats):
        for name, choose in variants.items():
            choose()
            taken[name].append(timed(call))
    return {name: seconds[1:] for name, seconds in taken.items()}


def attentions_of(model: Any) -> list[str]:
    """Those "auto" chooses from."""
    from transformers.utils import is_flash_attn_2_available

    if model.device.type == "cpu":
        return ["sdpa"] if model.training and model.config.attention_dropout else ["sdpa", "blocked"]
    return ["sdpa", "flash_attention_2"] if is_flash_attn_2_available() else ["sdpa"]


def taken_by_auto(model: Any, point: Point) -> tuple[str, str]:
    """Schedule and attention: the model's own questions, for whole texts of one length and their second segment."""
    from condense.attention import Visibility, choose_attention
    from condense.execution import choose_schedule
    from condense.memory import TransientMemory

    lengths, config = [point.length] * point.batch, model.config
    cursor = TransientMemory(point.batch, config).cursor
    schedule = choose_schedule(config, model.model.layers, lengths, cursor, point.checkpointing)
    piece = list(cursor.pieces(lengths))[:2][-1]
    num_keys = piece.visible_keys.stop - piece.visible_keys.start
    heads = (config.num_attention_heads, piece.width), (config.num_key_value_heads, num_keys)
    query, key = (next(model.parameters()).new_empty(point.batch, *size, config.head_dim) for size in heads)
    dropout = config.attention_dropout if model.training else 0.0
    return schedule, choose_attention(query, key, Visibility(piece), dropout)


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
    check_dtype(dtype)
    for name in chosen["attentions"]:
        check_attention(name)
    points = list(grid(("folded",), **chosen))
    setting = Setting(shape_of(shape, vocab_size), dtype, repeats, None)
    settings = {**asdict(setting), "hardware": hardware(), "torch": versions()["torch"]}
    settings |= {"threads": torch.get_num_threads()}
    with open_results_store(output / "schedules.records.jsonl", settings) as records:
        measured = []
        bar = tqdm(points, unit="point", desc="schedules")
        for point in bar:
            key = asdict(point)
            bar.set_postfix_str(f"{point.mode} {point.length:,} segment {point.segment_length}")
            record = records.get(key, lambda point=point: in_a_process("schedules", point, setting))
            measured.append({**key, **record})
        results = {"kind": "schedules", **run_metadata(), **settings, "points": measured}
        write_results(output / "schedules", results, measured)
        draw(results, output / "schedules")
    return results


def ratio(point: dict[str, Any]) -> float:
    """How much faster the wave is."""
    return point["sequential_seconds"] / point["wavefront_seconds"]


def excess(point: dict[str, Any], names: Sequence[str] = SCHEDULES, chosen: str = "auto") -> float:
    """The time of what "auto" takes over the best one's: 1 where it is right."""
    return point[f"{point[chosen]}_seconds"] / min(point[f"{name}_seconds"] for name in names)


def groups(results: dict[str, Any], *names: str) -> list[list[dict[str, Any]]]:
    """Points that agree in these fields."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in results["points"]:
        found.setdefault(json.dumps([point[name] for name in names]), []).append(point)
    return list(found.values())


def tables(results: dict[str, Any]) -> list[Table]:
    """Whose titles count where "auto" is right: schedules under each implementation of attention, and these."""
    made = []
    for points in groups(results, "attention"):
        ratios = "sequential / wavefront", ratio
        made.append(_table(f"schedules, attention {points[0]['attention']}", points, SCHEDULES, "auto", ratios))
    first = results["points"][0]["attention"]  # what is asked for does not matter here
    everywhere = [p for p in results["points"] if "auto_attention" in p and p["attention"] == first]
    if everywhere and len(names := _attentions_in(everywhere[0])) > 1:
        ratios = f"{names[0]} / {names[1]}", lambda point: point[f"{names[0]}_seconds"] / point[f"{names[1]}_seconds"]
        title = "attention, under the schedule that auto takes"
        made.append(_table(title, everywhere, names, "auto_attention", ratios))
    return made


def _attentions_in(point: dict[str, Any]) -> list[str]:
    return [name for name in point["times"] if name not in SCHEDULES]


def _table(
    title: str,
    points: list[dict[str, Any]],
    names: Sequence[str],
    chosen: str,
    ratios: tuple[str, Callable[[dict[str, Any]], float]],
) -> Table:
    columns = ["tokens", "segment", "batch", "mode", *[f"{name} [ms] (lowest to highest)" for name in names]]
    columns += [ratios[0], "auto takes", "auto's time / the best one's"]
    rows, right, fitting = [], 0, 0
    for point in points:
        row = [f"{point['length']:,}", point["segment_length"], point["batch"], point["mode"]]
        if point["out_of_memory"]:
            rows.append([*row, "OOM", *[""] * (len(names) + 2)])
            continue
        found = excess(point, names, chosen)
        fitting, right = fitting + 1, right + (found <= NEARLY)
        row += [_milliseconds(point, name) for name in names]
        rows.append([*row, f"{ratios[1](point):.2f}", point[chosen], f"{found:.2f}"])
    title += f": auto is within {NEARLY - 1:.0%} of the best one in {right} of {fitting} points"
    return Table(title, columns, rows)


def _milliseconds(point: dict[str, Any], name: str) -> str:
    middle, low, high = (f"{1000 * point[f'{name}_seconds{end}']:,.1f}" for end in ("", "_low", "_high"))
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
                axes.set_title(f"{points[0]['mode']}, batch {batch}, attention {points[0]['attention']}", fontsize=9)
                axes.grid(alpha=0.3)
            line[0].set_ylabel("sequential / wavefront\n(filled: auto takes the wave)", fontsize=8)
        panels[0][0].legend(fontsize=7)


def _curve(axes: Any, points: list[dict[str, Any]], label: str, color: str) -> None:
    points = sorted((point for point in points if not point["out_of_memory"]), key=lambda point: point["length"])
    axes.plot([point["length"] for point in points], list(map(ratio, points)), color=color, label=label, linewidth=1.2)
    for point in points:
        fill = color if point["auto"] == "wavefront" else "white"
        axes.plot(point["length"], ratio(point), "o", color=color, markerfacecolor=fill, ms=6)
