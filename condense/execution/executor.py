"""The forward pass of a chunk, and the interface of what decides when each chunk runs.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ..attention import AttentionMetadata
from ..layers import DecoderBlock
from ..memory import KeyValueState, Memory
from ..segmentation import Chunk

ChunkOutput = tuple[Chunk, Any]  # a chunk, and what `output` made of its final hidden states
Embed = Callable[[Chunk], torch.Tensor]  # the input [R, T, D] of the first layer
OutputFunction = Callable[[torch.Tensor, Chunk], Any]  # of the last layer's output [R, T, D]
CheckpointFunction = Callable[..., Any]  # as torch.utils.checkpoint.checkpoint, non-reentrant


class Executor(Protocol):
    """Runs the chunks of a call through the layers in an order of its own.

    An executor is made for one call with the decoder stack, the recurrent state, `embed`, `output` and, under
    gradient checkpointing, `checkpoint`.
    """

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        """Takes the next chunk; returns the outputs of the chunks that have left the last layer."""
        ...

    def finish(self) -> list[ChunkOutput]:
        """Returns the outputs of all other chunks; the state is complete then."""
        ...


def run_layers(
    layers: Sequence[DecoderBlock],
    hidden_RTD: torch.Tensor,
    key_values: Sequence[KeyValueState | None],
    metadata: AttentionMetadata,
) -> tuple[torch.Tensor, list[Memory | None]]:
    """One chunk through some layers: the output [R, T, D] of the last, and what each adds to the next memory."""
    memories = []
    for layer, layer_key_values in zip(layers, key_values, strict=True):
        hidden_RTD, memory = layer(hidden_RTD, layer_key_values, metadata)
        memories.append(memory)
    return hidden_RTD, memories


def run_checkpointed(
    checkpoint: CheckpointFunction | None,
    function: Callable[[torch.Tensor | None, Sequence[Any]], Any],
    metadata: AttentionMetadata,
    hidden_RTD: torch.Tensor | None,
    key_values: Sequence[KeyValueState | None],
) -> Any:
    """`function(hidden_RTD, key_values)`; with `checkpoint` it runs again in the backward pass.

    Then only the hidden states and the memories are stored. They are passed to `checkpoint` as single tensors, so
    that hooks on saved tensors see each of them. The rotary tables are passed because torch restores the random state
    of the devices of its arguments, and a first chunk has no other tensor.
    """
    if checkpoint is None:
        return function(hidden_RTD, key_values)
    assert all(item is None or isinstance(item, Memory) for item in key_values), "a cache is not checkpointed"
    tensors = [tensor for memory in key_values if isinstance(memory, Memory) for tensor in memory]
    is_there = [memory is not None for memory in key_values]
    return checkpoint(partial(_run_again, function, is_there), *metadata.rotary, hidden_RTD, *tensors)


def _run_again(function, is_there: Sequence[bool], cos, sin, hidden_RTD, *tensors):
    pairs = iter(zip(tensors[::2], tensors[1::2], strict=True))
    return function(hidden_RTD, [Memory(*next(pairs)) if there else None for there in is_there])


def offload_checkpoint(checkpoint: CheckpointFunction, function: Callable, *arguments: Any) -> Any:
    """As `checkpoint`; the stored hidden states and memories are kept in host memory until the backward pass."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *arguments)
