"""Gradient checkpointing: the backward pass computes groups of chunks again, each as a whole.

A group stores the memories that its first chunk sees. One group's activations exist at a time, so that larger groups
store fewer memories and hold more activations.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention import AttentionMetadata
from ..embedding import ChunkEmbedder
from ..ops.shared_weights import for_recomputation
from ..state.memory import KeyValueState, Memory, TransientState
from .executor import ChunkOutput, Executor

logger = logging.getLogger(__name__)

CheckpointFunction = Callable[..., Any]  # as torch.utils.checkpoint.checkpoint, non-reentrant


class CheckpointedExecutor:
    """Runs groups of `group_size` consecutive chunks, each with its own executor."""

    def __init__(
        self,
        executor: Callable[..., Executor],
        layers: nn.ModuleList,
        state: TransientState,
        embed: ChunkEmbedder,
        checkpoint: CheckpointFunction,
        group_size: int,
    ):
        self.executor, self.layers, self.state, self.embed = executor, layers, state, embed
        self.checkpoint, self.group_size = checkpoint, group_size
        self.group: list[AttentionMetadata] = []

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        self.group.append(metadata)
        return self.finish() if len(self.group) == self.group_size else []

    def finish(self) -> list[ChunkOutput]:
        group, self.group = self.group, []
        if not group:
            return []
        key_values = self.state.key_values(group[0].chunk)
        # Not a method: a checkpoint would keep this object, and with it the state, until the backward pass.
        run_group = partial(_run_group, self.executor, self.layers, self.embed, group)
        outputs, memories = run_checkpointed(self.checkpoint, run_group, group[0], None, key_values)
        if memories is not None:
            self.state.write_memory(memories, group[-1].chunk)
        return outputs


def _run_group(
    executor: Callable[..., Executor],
    layers: nn.ModuleList,
    embed: ChunkEmbedder,
    group: Sequence[AttentionMetadata],
    _: None,
    key_values: Sequence[Memory | None],
    sinks: Sequence[Memory | None] | None,
) -> tuple[list[ChunkOutput], Sequence[Memory | None] | None]:
    """Returns the outputs of the group's chunks, and the memories after them if a later chunk can see them."""
    chunks = [metadata.chunk for metadata in group]
    state = TransientState(chunks[0].batch_size, chunks[0].segment_length, key_values)
    state.rows = chunks[0].rows
    run = executor(layers, state, embed.of(chunks))
    outputs = [each for metadata in group for each in run.submit(replace(metadata, sinks=sinks))] + run.finish()
    if not group[-1].writes_memory:
        return outputs, None
    return outputs, [memory and memory.compact() for memory in state.memories]


def run_checkpointed(
    checkpoint: CheckpointFunction | None,
    function: Callable[[torch.Tensor | None, Sequence[Any], Sequence[Memory | None] | None], Any],
    metadata: AttentionMetadata,
    hidden_RTD: torch.Tensor | None,
    key_values: Sequence[KeyValueState | None],
) -> Any:
    """Runs `function(hidden_RTD, key_values, sinks)`; with `checkpoint` it runs again in the backward pass.

    Then only the hidden states, the memories and the sinks of `metadata` are stored. They are passed to `checkpoint` as
    single tensors, so that hooks on saved tensors see each of them. The rotary tables are also passed: torch restores
    the random state of its arguments' devices, and a first chunk has no other tensor.
    """
    if checkpoint is None:
        return function(hidden_RTD, key_values, metadata.sinks)
    assert all(item is None or isinstance(item, Memory) for item in key_values), "a cache is not checkpointed"
    memories = [*key_values, *(metadata.sinks or ())]
    tensors = [tensor for memory in memories if isinstance(memory, Memory) for tensor in memory]
    is_there = [memory is not None for memory in memories]
    run_again = partial(_run_again, for_recomputation(function), len(key_values), is_there)
    return checkpoint(run_again, *metadata.rotary, hidden_RTD, *tensors)


def _run_again(function, num_layers: int, is_there: Sequence[bool], cos, sin, hidden_RTD, *tensors):
    pairs = iter(zip(tensors[::2], tensors[1::2], strict=True))
    memories = [Memory(*next(pairs)) if there else None for there in is_there]
    return function(hidden_RTD, memories[:num_layers], memories[num_layers:] or None)


def non_reentrant(function: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of `torch.utils.checkpoint.checkpoint`, never reentrant; logs once if the caller asked for that.

    The results are the same. The reentrant form reports a gradient for each use of a weight, here for each segment.
    ZeRO and DDP do not expect this. It also needs inputs with gradients.
    """
    if options.get("use_reentrant"):
        _say_non_reentrant()
    if "use_reentrant" in options or function is torch.utils.checkpoint.checkpoint:
        return {**options, "use_reentrant": False}
    return dict(options)  # the caller's own function, which may have another form


@functools.cache
def _say_non_reentrant() -> None:
    logger.warning(
        "use_reentrant=True: a folded model is checkpointed with use_reentrant=False, which has the same results. Pass "
        "gradient_checkpointing_kwargs={'use_reentrant': False} to silence this."
    )


def storage_of(checkpoint: CheckpointFunction | None) -> AbstractContextManager[None]:
    """Chooses where a segment's stored data waits for the backward pass: in host memory under `offload_memories`."""
    if getattr(checkpoint, "func", None) is offload_checkpoint:
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    return nullcontext()


def offload_checkpoint(checkpoint: CheckpointFunction, function: Callable, *arguments: Any) -> Any:
    """Works like `checkpoint`, but keeps the stored hidden states and memories in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *arguments)
