"""What a layer remembers of the segment before: its keys and values for attention.

Axes: R rows, G key/value heads, K keys, E head width.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from .configuration import CondenseConfig
from .durations import Timeline
from .segmentation import Cursor, Piece


class Past(Protocol):
    """What queries may see besides the tokens of their own step."""

    def extend(
        self, key_RGTE: torch.Tensor, value_RGTE: torch.Tensor, piece: Piece
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, G, K, E] of everything the step's queries may see."""
        ...

    def memory(self, piece: Piece) -> "Memory | None":
        """What the piece's rows, all at the beginning of a segment, remember of the one before."""
        ...


class Memory(NamedTuple):
    """Keys and values of a layer's memory, each [R, G, K, E]: plain tensors that travel with the graph."""

    key_RGKE: torch.Tensor
    value_RGKE: torch.Tensor

    def extend(self, key_RGTE, value_RGTE, piece):
        return torch.cat([self.key_RGKE, key_RGTE], dim=2), torch.cat([self.value_RGKE, value_RGTE], dim=2)

    def memory(self, piece):
        return self

    def rows(self, first: int, end: int | None) -> "Memory":
        return Memory(self.key_RGKE[first:end], self.value_RGKE[first:end])

    def followed_by(self, other: "Memory") -> "Memory":
        """With the other's rows behind its own."""
        return Memory(*(torch.cat(pair) for pair in zip(self, other, strict=True)))


class TransientMemory:
    """The memories of all layers during one pass over whole texts: nothing outlives the pass."""

    def __init__(self, batch_size: int, config: CondenseConfig):
        self.cursor = Cursor(batch_size, config.segment_length)
        self.timeline: Timeline | None = None
        self.memories: Sequence[Memory | None] = [None] * config.num_hidden_layers
        self.rows = list(range(batch_size))

    def read(self, piece: Piece) -> Sequence[Memory | None]:
        if self.rows != piece.rows:  # some rows have ended
            kept = [self.rows.index(row) for row in piece.rows]
            self.memories = [memory and Memory(*(tensor[kept] for tensor in memory)) for memory in self.memories]
            self.rows = piece.rows
        return self.memories

    def write(self, remembered: Sequence[Memory], piece: Piece) -> None:
        self.memories = remembered
