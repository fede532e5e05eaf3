"""The order in which the (layer, segment) cells of a call run."""

import torch
from torch import nn

from ..embedding import ChunkEmbedder
from ..state.memory import RecurrentState, TransientState
from .checkpointing import CheckpointedExecutor, CheckpointFunction
from .executor import Executor
from .graph import INFERENCE_SEGMENTS, GraphExecutor
from .selection import Schedule, choose_schedule, default_checkpoint_segments, is_sharded, schedule_for
from .sequential import SequentialExecutor
from .wavefront import WavefrontExecutor

EXECUTORS = {"sequential": SequentialExecutor, "wavefront": WavefrontExecutor}


def make_executor(
    schedule: Schedule,
    layers: nn.ModuleList,
    state: RecurrentState,
    embed: ChunkEmbedder,
    checkpoint: CheckpointFunction | None = None,
    checkpoint_segments: int = 1,
) -> Executor:
    """Returns the executor of a call; with `checkpoint`, the executor that checkpoints groups of that many segments."""
    kind = EXECUTORS[schedule.order]
    executor: Executor
    if checkpoint is None:
        executor = kind(layers, state, embed)
    else:
        assert isinstance(state, TransientState), "a cache is not checkpointed"
        executor = CheckpointedExecutor(kind, layers, state, embed, checkpoint, checkpoint_segments)
    if schedule.stack is None:
        return executor
    segments = (
        checkpoint_segments if checkpoint is not None else None if torch.is_grad_enabled() else INFERENCE_SEGMENTS
    )
    return GraphExecutor(layers, schedule.stack, state, embed, executor, checkpoint, segments)


__all__ = [
    "EXECUTORS",
    "Executor",
    "GraphExecutor",
    "Schedule",
    "SequentialExecutor",
    "WavefrontExecutor",
    "choose_schedule",
    "default_checkpoint_segments",
    "is_sharded",
    "make_executor",
    "schedule_for",
]
