"""Training steps beside the stock model's: the package's default, and the order that it had before graphs.

Stock and folded models are built one after the other, so that each has the memory for itself.
"""

from dataclasses import replace

import torch

from ..cases import ModelVariant
from ..timing import free_memory
from .comparison import compare_variants
from .parts import CHECKPOINT_SEGMENTS
from .session import OutOfTimeError, Session, build_models

WARM_UPS = 4  # a shape is captured at its second use
UNGRAPHED = 8192  # tokens up to which waves are measured without graphs, too: the host takes seconds for more


def steps(session: Session) -> None:
    """Forward and backward pass, with and without gradient checkpointing; `auto` is the default."""
    for name, shape, batch, length in session.sizes.steps:
        for checkpointing in (False, True):
            if session.seconds_left() < 10:
                raise OutOfTimeError(f"before {name}, {batch} x {length:,}")
            row = f"step, {name}, {batch} x {length:,}" + ", checkpointing" * checkpointing
            stock = [ModelVariant(kind="stock", checkpointing=checkpointing)]
            models = build_models(session, shape, ["stock"])
            compare_variants(session, row, "training", models, stock, length, batch)
            del models
            free_memory()
            models = build_models(session, shape, ["folded"])
            for variant in _variants(session.sizes.segment, checkpointing, ungraphed=batch * length <= UNGRAPHED):
                compare_variants(session, row, "training", models, [variant], length, batch, WARM_UPS)
                if session.device.type == "cuda":
                    session.points[-1]["reserved_bytes"] = torch.cuda.memory_reserved()
            del models
            free_memory()


def _variants(segment: int, checkpointing: bool, ungraphed: bool) -> list[ModelVariant]:
    """The default, by groups of one segment and of several, and waves without graphs."""
    auto = ModelVariant(kind="folded", segment_length=segment, schedule="auto", checkpointing=checkpointing)
    grouped = replace(auto, checkpoint_segments=CHECKPOINT_SEGMENTS) if checkpointing else auto
    found = [grouped, auto] if checkpointing else [auto]
    return found + ([replace(grouped, schedule="wavefront")] if ungraphed else [])
