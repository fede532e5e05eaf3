"""Compares the schedules and attentions of a folded model, and shows whether "auto" picks the faster ones.

Each case runs in its own process. There the schedules take turns, repeat by repeat, so a drift of the machine affects
both. Then the implementations of attention take turns, under the schedule that "auto" picks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from condense.attention import choose_attention
from condense.checks import check_attention, check_dtype
from condense.execution import choose_schedule
from condense.segmentation import SegmentPositions

from . import schedule_tables
from .cases import SCHEDULES, BenchmarkCase
from .grid import DEFAULTS, Environment, GridTask, axes, grid, prepare, run_grid
from .memory import PeakMemory, or_out_of_memory
from .options import ProfileOptions
from .sources import read_models
from .timing import Contender, measure_in_turn, summarize
from .workloads import WHOLE_TEXT_WORKLOADS, random_ids


class Schedules(GridTask):
    kind = "schedules"
    tables = staticmethod(schedule_tables.tables)
    draw = staticmethod(schedule_tables.draw)


def schedules(output: Path, options: ProfileOptions) -> dict[str, Any]:
    """Measures every combination and writes output/schedules.*.

    Runs without gradient checkpointing: with it, "auto" is always sequential to save memory. Call it again with the
    same options to resume a stopped measurement. Raises `ValueError` for options that cannot be measured.
    """
    chosen = axes(options, DEFAULTS | {"modes": tuple(WHOLE_TEXT_WORKLOADS)})
    if wrong := [mode for mode in chosen["modes"] if mode not in WHOLE_TEXT_WORKLOADS]:
        raise ValueError(
            f"modes={wrong}: schedules differ only if one call reads several segments: choose from "
            f"{', '.join(WHOLE_TEXT_WORKLOADS)}."
        )
    check_dtype(options.dtype)
    for name in chosen["attentions"]:
        check_attention(name)
    (model,) = read_models(options)
    (kind,) = model.kinds(["folded"])
    cases = [replace(case, model=model.name) for case in grid((kind,), **chosen, checkpointing=(False,))]
    environment = Environment((model,), options.dtype, options.repeats)
    return run_grid(Schedules, output, cases, measure, environment, threads=torch.get_num_threads())


def measure(case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """Returns the seconds of each schedule and attention, and the choices of "auto", in this process.

    A case that does not fit into memory has `out_of_memory`.
    """
    model, memory, device, dtype = prepare(case, environment)
    figures = {"parameters": model.num_parameters(), "dtype": dtype, "out_of_memory": False}
    placed = partial(model.to, device, getattr(torch, dtype))
    return or_out_of_memory(figures, lambda: compare(placed(), case, environment.repeats, memory))


def compare(model: Any, case: BenchmarkCase, repeats: int, memory: PeakMemory) -> dict[str, Any]:
    """Returns figures after a warm-up of each; `times` holds the seconds of every repeat."""
    call = WHOLE_TEXT_WORKLOADS[case.mode](model, random_ids(model, case.batch, case.length))
    schedule, attention = choices_of_auto(model, case)
    set_schedule = partial(setattr, model.config, "schedule")

    def times_of(settings: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        contenders = [Contender(model, call, choose) for choose in settings.values()]
        taken = measure_in_turn(contenders, memory, repeats)
        if not all(taken):
            raise MemoryError(f"{case} does not fit into memory.")
        seconds = ([sample.seconds for sample in samples] for samples in taken)
        return dict(zip(settings, seconds, strict=True))

    times = times_of({name: partial(set_schedule, name) for name in SCHEDULES})
    set_schedule(schedule)
    times |= times_of({name: partial(model.set_attn_implementation, name) for name in attentions_of(model)})
    figures: dict[str, Any] = {"auto": schedule, "auto_attention": attention}
    for name, seconds in times.items():
        figures |= {f"{name}_{figure}": value for figure, value in summarize(seconds).items()}
    return figures | {"times": times}


def attentions_of(model: Any) -> list[str]:
    """Returns the implementations that "auto" chooses from."""
    has_dropout = model.training and model.config.attention_dropout
    return ["sdpa", "blocked"] if model.device.type == "cpu" and not has_dropout else ["sdpa"]


def choices_of_auto(model: Any, case: BenchmarkCase) -> tuple[str, str]:
    """Returns the model's choice of schedule, for texts of one length, and of attention, for their second segment."""
    lengths, config = [case.length] * case.batch, model.config
    positions = SegmentPositions(case.batch, config.segment_length)
    schedule = choose_schedule(config, model.model.layers, lengths, positions)
    chunk = list(positions.chunks(lengths))[:2][-1]
    num_keys = chunk.visible_keys.stop - chunk.visible_keys.start
    heads = (config.num_attention_heads, chunk.width), (config.num_key_value_heads, num_keys)
    query, key = (next(model.parameters()).new_empty(case.batch, *size, config.head_dim) for size in heads)
    dropout = config.attention_dropout if model.training else 0.0
    return schedule, choose_attention(query, key, dropout)
