"""The memory of a layer: the keys and values of the segment before.

Axes: R rows of a chunk, G key/value heads, T tokens of a chunk, K keys, E head dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..configuration import CondenseConfig
from ..durations import Timeline
from ..ops.transforms import join
from ..segmentation import Chunk, SegmentPositions, on_device


class KeyValueState(Protocol):
    """The keys and values of one layer that the queries of a chunk see besides the chunk's own."""

    def extend(
        self, key_RGTE: torch.Tensor, value_RGTE: torch.Tensor, chunk: Chunk
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the chunk's own; returns all keys and values [R, G, K, E] that its queries see."""
        ...

    def memory(self, chunk: Chunk) -> "Memory | None":
        """Returns only the memory, for a chunk of whole segments."""
        ...

    def at_evaluation(self, number: int, num_evaluations: int) -> "KeyValueState":
        """Returns the state that evaluation `number` sees, for a block that evaluates its attention several times.

        All evaluations have the same memory, and each has its own keys and values of the current segment.
        """
        ...


class Memory(NamedTuple):
    """Keys and values of a layer's memory, each [R, G, K, E]: plain tensors that are part of the autograd graph."""

    key_RGKE: torch.Tensor
    value_RGKE: torch.Tensor

    def extend(self, key_RGTE, value_RGTE, chunk):
        return join([self.key_RGKE, key_RGTE], dim=2), join([self.value_RGKE, value_RGTE], dim=2)

    def memory(self, chunk):
        return self

    def at_evaluation(self, number, num_evaluations):
        return self

    def with_sink(self, sink: "Memory | None", chunk: Chunk) -> "Memory":
        """Returns the memory with the sink [1 or R, G, 1, E] in place of a segment's first token, in the rows whose
        segment begins with the chunk."""
        if sink is None or 0 not in chunk.offsets:
            return self
        begins = [offset == 0 for offset in chunk.offsets]
        return Memory(*(_with_first(own, first, begins) for own, first in zip(self, sink, strict=True)))

    def rows(self, first: int, end: int | None) -> "Memory":
        if first == 0 and end in (None, len(self.key_RGKE)):
            return self  # not a slice of all rows, whose gradient would be a copy
        return Memory(self.key_RGKE[first:end], self.value_RGKE[first:end])

    def select(self, rows: Sequence[int]) -> "Memory":
        return Memory(self.key_RGKE[list(rows)], self.value_RGKE[list(rows)])

    def compact(self) -> "Memory":
        """Returns the same memory, as a copy if it is part of larger tensors: they can be freed then."""
        return Memory(
            *(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone() for tensor in self)
        )

    def append(self, other: "Memory") -> "Memory":
        """Joins the rows of both."""
        return Memory(*(join(pair) for pair in zip(self, other, strict=True)))


def _with_first(memory_RGTE: torch.Tensor, sink_RG1E: torch.Tensor, begins: Sequence[bool]) -> torch.Tensor:
    first_RG1E = sink_RG1E.to(memory_RGTE.dtype).expand(memory_RGTE.shape[0], -1, -1, -1)  # symbolic in an export
    if not all(begins):
        begins_R111 = on_device(torch.tensor(begins), memory_RGTE.device)[:, None, None, None]
        first_RG1E = torch.where(begins_R111, first_RG1E, memory_RGTE[:, :, :1])
    return join([first_RG1E, memory_RGTE[:, :, 1:]], dim=2)


class RecurrentState(Protocol):
    """Everything that is carried from chunk to chunk: `TransientState` within a call, `FoldedCache` across calls."""

    positions: SegmentPositions
    timeline: Timeline | None

    @property
    def is_recording(self) -> bool:
        """Tells whether the last tokens may be removed again."""
        ...

    def key_values(self, chunk: Chunk) -> Sequence[KeyValueState | None]:
        """Returns the state that each layer's queries see; None for a layer without a memory of these rows."""
        ...

    def write_memory(self, memories: Sequence[Memory | None], chunk: Chunk) -> None:
        """Stores each layer's keys and values of the chunk for the next segment; None from a layer without memory."""
        ...


class TransientState:
    """The memories of all layers during one call over whole texts; nothing is kept after the call.

    `memories` holds the initial memories of the rows, one for each layer, or None.
    """

    is_recording = False

    def __init__(self, batch_size: int, segment_length: int, memories: Sequence[Memory | None]):
        self.positions = SegmentPositions(batch_size, segment_length)
        self.timeline: Timeline | None = None
        self.memories = memories
        self.rows = list(range(batch_size))

    @classmethod
    def empty(cls, batch_size: int, config: CondenseConfig) -> "TransientState":
        return cls(batch_size, config.segment_length, [None] * config.num_hidden_layers)

    def key_values(self, chunk: Chunk) -> Sequence[Memory | None]:
        if self.rows != chunk.rows:  # the texts of some rows have ended
            kept = [self.rows.index(row) for row in chunk.rows]
            self.memories = [memory and memory.select(kept) for memory in self.memories]
            self.rows = chunk.rows
        return self.memories

    def write_memory(self, memories: Sequence[Memory | None], chunk: Chunk) -> None:
        self.memories, self.rows = memories, chunk.rows
