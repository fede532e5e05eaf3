"""Times training steps by default and by waves without graphs, beside the stock model's.

Stock and folded models are built one after the other, so each has all the memory.
"""

from dataclasses import replace
from typing import Any

import torch

from condense.eval.benchmark.cases import ModelVariant
from condense.eval.benchmark.timing import free_memory
from condense.eval.results import Table

from .comparison import compare_variants
from .parts import CHECKPOINT_SEGMENTS
from .session import OutOfTimeError, Session, build_models

IN_A_ROW = 4  # steps of a repeat; a shape is captured the second time it is used, in the first repeat
UNGRAPHED = 8192  # up to so many tokens, waves are also measured without graphs; beyond, the host takes seconds


def steps(session: Session) -> None:
    """Times forward and backward passes, with and without gradient checkpointing; `auto` is the default."""
    for name, shape, batch, length in session.sizes.steps:
        for checkpointing in (False, True):
            if session.seconds_left() < 10:
                raise OutOfTimeError(f"before {name}, {batch} x {length:,}")
            row = f"step, {name}, {batch} x {length:,}" + ", checkpointing" * checkpointing
            stock = [ModelVariant(kind="stock", checkpointing=checkpointing)]
            models = build_models(session, shape, ["stock"])
            compare_variants(session, row, "training", models, stock, length, batch, in_a_row=IN_A_ROW)
            del models
            free_memory()
            models = build_models(session, shape, ["folded"])
            for variant in _variants(session.sizes.segment, checkpointing, ungraphed=batch * length <= UNGRAPHED):
                compare_variants(session, row, "training", models, [variant], length, batch, in_a_row=IN_A_ROW)
                if session.device.type == "cuda":
                    session.points[-1]["reserved_bytes"] = torch.cuda.memory_reserved()
            del models
            free_memory()


COLUMNS = ["training step", "stock [ms]", "by default [ms]", "lowest to highest [ms]", "stock / default", "target"]
COLUMNS += ["single segments [ms]", "waves, no graph [ms]", "reserved [GiB]"]
TARGETS = {  # for stock / default, from a model of each kernel's time on an H100
    "Table I, 1 x 2,048": 1.7,
    "Table I, 1 x 4,096": 1.68,
    "Table I, 1 x 16,384": 2.3,
    "Table I, 1 x 4,096, checkpointing": 1.6,
    "1.2 B, 1 x 8,192, checkpointing": 1.35,
    "1.2 B, 1 x 32,768, checkpointing": 2.1,
    "1.2 B, 8 x 4,096, checkpointing": 1.28,
}


def step_table(points: list[dict[str, Any]]) -> Table:
    """Returns the steps of the part `steps`, the default beside the stock model."""
    rows = []
    for row in dict.fromkeys(point["row"] for point in points if point["row"].startswith("step, ")):
        stock, *folded = [point for point in points if point["row"] == row]
        default = folded[0] if folded else {}  # none after an error
        single = [point for point in folded[1:] if point["schedule"] == "auto"]
        waves = [point for point in folded if point["schedule"] == "wavefront"]
        name, known = row.removeprefix("step, "), stock.get("seconds") and default.get("seconds")
        spread = [f"{1000 * default[key]:.1f}" for key in ("seconds_low", "seconds_high") if key in default]
        reserved = default.get("reserved_bytes")
        rows.append(
            [
                name,
                _milliseconds([stock]),
                _milliseconds(folded[:1]),
                " to ".join(spread),
                f"{stock['seconds'] / default['seconds']:.2f}" if known else "",
                f"{TARGETS[name]:g}" if name in TARGETS else "",
                _milliseconds(single),
                _milliseconds(waves),
                "" if reserved is None else f"{reserved / 2**30:.1f}",
            ]
        )
    return Table("training steps", COLUMNS, rows)


def _milliseconds(points: list[dict[str, Any]]) -> str:
    if not points:
        return ""
    return "out of memory" if points[0]["out_of_memory"] else f"{1000 * points[0]['seconds']:.1f}"


def _variants(segment: int, checkpointing: bool, ungraphed: bool) -> list[ModelVariant]:
    """Returns the default, by groups of one and of several segments, and waves without graphs."""
    auto = ModelVariant(kind="folded", segment_length=segment, schedule="auto", checkpointing=checkpointing)
    grouped = replace(auto, checkpoint_segments=CHECKPOINT_SEGMENTS) if checkpointing else auto
    found = [grouped, auto] if checkpointing else [auto]
    return found + ([replace(grouped, schedule="wavefront")] if ungraphed else [])
