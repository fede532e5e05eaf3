"""The decoder stack of a model: its layers, and a block that may stand among them.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from .attention import AttentionMetadata
from .configuration import CondenseConfig
from .laboratories import DECODER_BLOCKS
from .layers import CondenseDecoderLayer
from .state.memory import KeyValueState, Memory


class BlockCost(NamedTuple):
    """The costs that a block adds to a plan, as its class's `cost(settings)` gives them: its place in the stack and,
    for each token, the evaluations of its field."""

    position: int
    evaluations: int
    width: int  # of an MLP field; 0 if the field is a layer
    is_adjoint: bool  # the backward pass evaluates the field again


class DecoderBlock(Protocol):
    """A member of the decoder stack: `CondenseDecoderLayer`, or a module that takes the place of one or more layers.

    A cache can be saved if every member with a memory has `attention_evaluations`: how often it computes attention for
    a token, with keys and values of its own each time.
    """

    def __call__(
        self, input_RTD: torch.Tensor, key_values: KeyValueState | None, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, Memory | None]:
        """Returns the output [R, T, D] and this chunk's part of the next memory, or None for a block without memory.

        `key_values` holds the memory that the block returned for the segment before. In a cache it also holds the keys
        and values of earlier chunks of the current segment. Without a memory it is None, or an empty layer of a cache.
        If `metadata.is_sink`, the returned memory is that of the input: see `condense.sinks`.
        """
        ...


def decoder_stack(config: CondenseConfig) -> nn.ModuleList:
    """Returns the layers of a configuration, including its block, if any."""
    layers: list[nn.Module] = [CondenseDecoderLayer(config, number) for number in range(config.num_hidden_layers)]
    if (found := find_block(config)) is not None:
        block = found[0](config)
        layers[block.position] = block
    return nn.ModuleList(layers)


def find_block(config: Any) -> tuple[Any, Mapping[str, Any]] | None:
    """Returns the class and the settings of the block in a configuration's stack, or None without a block."""
    for name, block in DECODER_BLOCKS.items():
        if (settings := getattr(config, name, None)) is not None:
            return resolve_name(block), settings
    return None
