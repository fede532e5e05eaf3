"""One layer of a `FoldedCache`: chunks are written to its buffers, which roll at the end of a segment.

Axes: B rows of a batch, R rows of a chunk, G key/value heads, L segment length, T tokens of a chunk, K keys, E head
dimension, n tokens of a chunk without padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from ..segmentation import Chunk, on_device
from .memory import Memory

ALL_HEADS = slice(None)
BUFFERS = ("keys", "values", "next_keys", "next_values")


class FoldedCacheLayer(CacheLayerMixin):
    """One layer's buffers: `keys`, `values` [B, G, 2L, E] and `next_keys`, `next_values` [B, G, L, E].

    For a block that evaluates its attention several times, the first two are [B, evaluations * G, 2L, E].
    """

    is_sliding = False

    keys: torch.Tensor
    values: torch.Tensor
    next_keys: torch.Tensor
    next_values: torch.Tensor

    def __init__(self, segment_length: int):
        super().__init__()
        self.segment_length = segment_length

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Returns the four buffers; none before the first token."""
        return [getattr(self, name) for name in BUFFERS] if self.is_initialized else []

    def lazy_initialization(self, key_states, value_states, num_evaluations: int = 1) -> None:
        batch_size, num_heads, _, head_dim = key_states.shape
        current = (batch_size, num_evaluations * num_heads, 2 * self.segment_length, head_dim)
        following = (batch_size, num_heads, self.segment_length, head_dim)
        self.keys, self.values = key_states.new_zeros(current), value_states.new_zeros(current)
        self.next_keys, self.next_values = key_states.new_zeros(following), value_states.new_zeros(following)
        self.is_initialized = True

    def extend(self, key_RGTE, value_RGTE, chunk: Chunk, number: int = 0, num_evaluations: int = 1):
        """Stores a chunk's keys and values of an evaluation; returns all [R, G, K, E] that its queries see.

        For a uniform chunk they are views that end with the chunk's own tokens; otherwise whole buffers.
        """
        self._allocate(key_RGTE, value_RGTE, chunk, num_evaluations)
        num_heads = key_RGTE.shape[1]
        heads = slice(number * num_heads, (number + 1) * num_heads)
        self.keys = _write(self.keys, key_RGTE, chunk, self.segment_length, heads)
        self.values = _write(self.values, value_RGTE, chunk, self.segment_length, heads)
        visible = chunk.visible_keys if chunk.uniform else slice(None)
        return tuple(
            (buffer if chunk.all_rows else buffer[chunk.rows])[:, heads, visible] for buffer in (self.keys, self.values)
        )

    def at_evaluation(self, number: int, num_evaluations: int) -> "EvaluationKeyValues":
        return EvaluationKeyValues(self, number, num_evaluations)

    def _allocate(self, key_RGTE, value_RGTE, chunk: Chunk, num_evaluations: int = 1) -> None:
        if not self.is_initialized:
            all_rows = (chunk.batch_size, -1, -1, -1)
            self.lazy_initialization(key_RGTE[:1].expand(all_rows), value_RGTE[:1].expand(all_rows), num_evaluations)

    def memory(self, chunk: Chunk) -> Memory | None:
        if not self.is_initialized or chunk.memory_lengths[0] == 0:
            return None
        rows, num_heads = slice(None) if chunk.all_rows else chunk.rows, self.next_keys.shape[1]
        return Memory(*(buffer[rows, :num_heads, : self.segment_length] for buffer in (self.keys, self.values)))

    def write_memory(self, memory: Memory, chunk: Chunk) -> None:
        """Stores the keys and values that the chunk's tokens will have in the next memory."""
        self._allocate(*memory, chunk)
        self.next_keys = _write(self.next_keys, memory.key_RGKE, chunk)
        self.next_values = _write(self.next_values, memory.value_RGKE, chunk)

    def roll(self, chunk: Chunk) -> None:
        """Starts the next segment of rows that complete one: their next memory becomes their memory."""
        if chunk.completed_rows and self.is_initialized:
            self.keys = self._roll(self.keys, self.next_keys, chunk)
            self.values = self._roll(self.values, self.next_values, chunk)

    def _roll(self, buffer_BG2LE, next_BGLE, chunk: Chunk):
        rolled, rows = _writable(buffer_BG2LE), chunk.completed_rows
        completed = slice(None) if len(rows) == chunk.batch_size else rows
        by_evaluation = rolled.unflatten(1, (-1, next_BGLE.shape[1]))  # a view: all of them see the same memory
        by_evaluation[completed, :, :, : self.segment_length] = next_BGLE[completed, None]
        return rolled

    def restore(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copies `buffers`, in place if no gradient is recorded and the tensors are alike."""
        if not buffers:
            for name in BUFFERS:
                setattr(self, name, None)
            self.is_initialized = False
            return
        for name, saved in zip(BUFFERS, buffers, strict=True):
            own = getattr(self, name) if self.is_initialized else None
            setattr(self, name, own.copy_(saved) if own is not None and _takes(own, saved) else saved.clone())
        self.is_initialized = True

    def select(self, rows_B: torch.Tensor) -> None:
        if self.is_initialized:
            for name in BUFFERS:
                buffer = getattr(self, name)
                setattr(self, name, buffer.index_select(0, rows_B.to(buffer.device)))

    # The rest of transformers' interface for a layer; the cache counts the tokens of all layers.

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError("a FoldedCache belongs to a CondenseForCausalLM: other models cannot write to it.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 2 * self.segment_length, 0

    def get_seq_length(self) -> int:
        raise TypeError("the cache counts tokens, not its layers: use FoldedCache.get_seq_length().")

    def get_max_length(self) -> int:
        return -1


class EvaluationKeyValues(NamedTuple):
    """A layer's buffers for one of several evaluations."""

    layer: FoldedCacheLayer
    number: int
    num_evaluations: int

    def extend(self, key_RGTE, value_RGTE, chunk: Chunk):
        return self.layer.extend(key_RGTE, value_RGTE, chunk, self.number, self.num_evaluations)

    def memory(self, chunk: Chunk) -> Memory | None:
        return self.layer.memory(chunk)

    def at_evaluation(self, number: int, num_evaluations: int) -> "EvaluationKeyValues":
        raise AssertionError("an evaluation can't have evaluations")


def _writable(buffer: torch.Tensor) -> torch.Tensor:
    """Returns the buffer itself if no gradient is recorded; a copy if autograd may need the old values."""
    frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
    recorded = torch.is_grad_enabled() or buffer.requires_grad
    return buffer.clone() if recorded or frozen else buffer


def _takes(own: torch.Tensor, saved: torch.Tensor) -> bool:
    """Returns whether a copy can overwrite a buffer without a trace in any graph."""
    alike = (own.shape, own.dtype, own.device) == (saved.shape, saved.dtype, saved.device)
    return alike and _writable(own) is own and not saved.requires_grad


def _write(
    buffer_BGKE: torch.Tensor, values_RGTE: torch.Tensor, chunk: Chunk, first_key: int = 0, heads: slice = ALL_HEADS
) -> torch.Tensor:
    """Writes a chunk's tokens at each row's offset in its segment, which begins at key `first_key` of the buffer."""
    written = _writable(buffer_BGKE)
    if chunk.all_rows and chunk.uniform and chunk.rectangular:
        first = first_key + chunk.offsets[0]
        written[:, heads, first : first + chunk.width] = values_RGTE
    else:
        device = buffer_BGKE.device
        row_n, token_n = chunk.token_indices
        key_n = first_key + torch.tensor(chunk.offsets)[row_n] + token_n
        own_row_n = torch.tensor(chunk.rows)[row_n]
        own_row_n, key_n, row_n, token_n = (on_device(index, device) for index in (own_row_n, key_n, row_n, token_n))
        written[own_row_n, heads, key_n] = values_RGTE[row_n, :, token_n]
    return written
