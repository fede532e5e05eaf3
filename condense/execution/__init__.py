"""The order in which the (layer, segment) cells of a call run."""

from torch import nn

from ..embedding import ChunkEmbedder
from ..memory import RecurrentState, TransientState
from .checkpointing import CheckpointedExecutor, CheckpointFunction
from .executor import Executor
from .segment_graph import GraphExecutor
from .selection import choose_schedule, schedule_for
from .sequential import SequentialExecutor
from .wavefront import WavefrontExecutor

EXECUTORS = {"sequential": SequentialExecutor, "wavefront": WavefrontExecutor, "graph": GraphExecutor}


def make_executor(
    schedule: str,
    layers: nn.ModuleList,
    state: RecurrentState,
    embed: ChunkEmbedder,
    checkpoint: CheckpointFunction | None = None,
    checkpoint_segments: int = 1,
) -> Executor:
    """The executor of a call; with `checkpoint`, that of gradient checkpointing by groups of so many segments."""
    if checkpoint is None:
        return EXECUTORS[schedule](layers, state, embed)
    assert isinstance(state, TransientState), "a cache is not checkpointed"
    if schedule == "graph":
        return GraphExecutor(layers, state, embed, checkpoint)
    return CheckpointedExecutor(EXECUTORS[schedule], layers, state, embed, checkpoint, checkpoint_segments)


__all__ = [
    "EXECUTORS",
    "Executor",
    "GraphExecutor",
    "SequentialExecutor",
    "WavefrontExecutor",
    "choose_schedule",
    "make_executor",
    "schedule_for",
]
