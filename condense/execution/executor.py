"""The forward pass of a chunk, and the interface of executors, which decide when each chunk runs.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..attention import AttentionMetadata
from ..decoder_stack import DecoderBlock
from ..segmentation import Chunk
from ..state.memory import KeyValueState, Memory

ChunkOutput = tuple[Chunk, torch.Tensor]  # a chunk, and the last layer's output [R, T, D]
Embed = Callable[[Chunk], torch.Tensor]  # the input [R, T, D] of the first layer for the next chunk


class Executor(Protocol):
    """Runs the chunks of a call through the layers in its own order.

    An executor is made for one call with the decoder stack, the recurrent state and `embed`. If an output is a view,
    copy it before you keep it: its memory may be large or soon overwritten.
    """

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        """Accepts the next chunk; returns the outputs of the chunks that have left the last layer."""
        ...

    def finish(self) -> list[ChunkOutput]:
        """Returns the outputs of all other chunks; then the state is complete."""
        ...


def run_layers(
    layers: Sequence[DecoderBlock],
    hidden_RTD: torch.Tensor,
    key_values: Sequence[KeyValueState | None],
    metadata: AttentionMetadata,
) -> tuple[torch.Tensor, list[Memory | None]]:
    """Runs a chunk through some layers; returns the output [R, T, D] and each layer's part of the next memory.

    `metadata.sinks` belong to these layers.
    """
    memories = []
    sinks = metadata.sinks or [None] * len(layers)
    for layer, layer_key_values, sink in zip(layers, key_values, sinks, strict=True):
        hidden_RTD, memory = layer(hidden_RTD, layer_key_values, metadata)
        memories.append(memory and memory.with_sink(sink, metadata.chunk))
    return hidden_RTD, memories
