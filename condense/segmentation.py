"""How a batch of texts is cut into chunks.

- Segment: `segment_length` consecutive tokens of one row.
- Call: one forward pass of the model, with some further tokens of each row.
- Chunk: the tokens that all layers process together. Of each row it has at most the tokens up to the end of the row's
  current segment.

Rows of a padded batch are aligned to their own first token, so a row's segments and its answer do not depend on
its neighbours. All counts are Python integers, computed on the CPU once per call.

Axes: B rows of a batch, R rows of a chunk, N columns of an input (padding included), T tokens of a chunk, L segment
length, n tokens of a chunk without padding, 1 a broadcast axis.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


def all_alike(values: Sequence[int]) -> bool:
    """Returns whether all numbers are the same; in an export they may be symbols, which a set does not take."""
    return all(value == values[0] for value in values)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to a device; the host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of some rows, each within one segment of its row.

    The chunk has `counts[r]` tokens of row `rows[r]`. The first of them has the index `starts[r]` among the row's
    tokens in this call, and the index `offsets[r]` within segment `segments[r]` of the row's text. Indices begin at 0.
    """

    batch_size: int
    segment_length: int
    rows: list[int]
    starts: list[int]
    counts: list[int]
    offsets: list[int]
    segments: list[int]

    @property
    def width(self) -> int:
        return max(self.counts)

    @property
    def all_rows(self) -> bool:
        return len(self.rows) == self.batch_size

    @property
    def rectangular(self) -> bool:
        """Tells whether all rows have the same number of tokens."""
        return all_alike(self.counts)

    @property
    def uniform(self) -> bool:
        """Tells whether all rows have the same offset, and all or none have a memory: a causal mask is sufficient."""
        return all_alike(self.offsets) and all_alike([segment > 0 for segment in self.segments])

    @property
    def whole_segments(self) -> bool:
        """Tells whether the chunk is one whole segment of each of its rows."""
        return self.uniform and self.rectangular and self.width == self.segment_length

    @property
    def memory_lengths(self) -> list[int]:
        return [self.segment_length if segment else 0 for segment in self.segments]

    @property
    def visible_keys(self) -> slice:
        """Returns the part of the buffer [memory L ; current L] that the queries of a uniform chunk see."""
        assert self.uniform
        return slice(self.segment_length - self.memory_lengths[0], self.segment_length + self.offsets[0] + self.width)

    @cached_property
    def token_indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns indices (r, t) of all tokens, each [n] on the CPU; the rest of the rectangle [R, T] is padding."""
        tokens_T = torch.arange(self.width)
        row_n, token_n = (tokens_T < torch.tensor(self.counts)[:, None]).nonzero(as_tuple=True)
        return row_n, token_n

    @property
    def completed_rows(self) -> list[int]:
        """Returns the rows that complete a segment with this chunk."""
        ends = zip(self.rows, self.offsets, self.counts, strict=True)
        return [row for row, offset, count in ends if offset + count == self.segment_length]


class SegmentPositions:
    """The position of each row's next token: the index `offsets[b]` within segment `segments[b]`, both from 0."""

    def __init__(self, batch_size: int, segment_length: int):
        self.segment_length = segment_length
        self.offsets = [0] * batch_size
        self.segments = [0] * batch_size

    def chunks(self, lengths: list[int]) -> Iterator[Chunk]:
        """Yields the chunks of `lengths[b]` further tokens of each row.

        Side effect: the positions advance past a chunk when the next one is requested.
        """
        taken = [0] * len(lengths)
        while rows := [b for b, length in enumerate(lengths) if taken[b] < length]:
            chunk = Chunk(
                batch_size=len(lengths),
                segment_length=self.segment_length,
                rows=rows,
                starts=[taken[b] for b in rows],
                counts=[self._next_count(b, lengths[b] - taken[b]) for b in rows],
                offsets=[self.offsets[b] for b in rows],
                segments=[self.segments[b] for b in rows],
            )
            yield chunk
            for b, count in zip(rows, chunk.counts, strict=True):
                taken[b] += count
                self.offsets[b] += count
                if self.offsets[b] == self.segment_length:
                    self.offsets[b] = 0
                    self.segments[b] += 1

    def _next_count(self, row: int, left: int) -> int:
        """Returns the tokens of the row's next chunk; `min` would return a symbol in an export."""
        room = self.segment_length - self.offsets[row]
        return room if left >= room else left

    def is_one_chunk(self, lengths: list[int]) -> bool:
        """Returns whether `chunks` yields one chunk at most."""
        return all(map(lambda offset, length: offset + length <= self.segment_length, self.offsets, lengths))

    def select(self, rows_B: list[int]) -> None:
        """Makes row i a copy of the row `rows_B[i]`, as in beam search."""
        self.offsets = [self.offsets[b] for b in rows_B]
        self.segments = [self.segments[b] for b in rows_B]


class UnpaddedBatch:
    """The layout of a batch without its padding, which may be on either side.

    `lengths[b]` is the number of tokens of row b. `mask_BN` (on the CPU) is true at tokens and false at padding; None
    if there is no padding.
    """

    def __init__(self, batch_size: int, num_columns: int, mask_BN: torch.Tensor | None):
        self.batch_size, self.num_columns = batch_size, num_columns
        self.mask_BN = None if mask_BN is None or bool(mask_BN.all()) else mask_BN.bool()
        if self.mask_BN is None:
            self.lengths = [num_columns] * batch_size
        else:
            self.lengths = self.mask_BN.sum(1).tolist()
            # The columns of each row's tokens in order, then the columns of its padding.
            self.columns_BN = self.mask_BN.logical_not().byte().argsort(dim=1, stable=True)

    def shared_columns(self, chunk: Chunk) -> slice | None:
        """Returns the chunk's columns if they are the same in all rows of a batch without padding."""
        start = chunk.starts[0]
        whole = self.mask_BN is None and chunk.all_rows and chunk.rectangular and all_alike(chunk.starts)
        return slice(start, start + chunk.width) if whole else None

    def gather(self, tensor_BN: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Returns the chunk's part [R, T, ...] of a tensor [B, N, ...]; after a row's tokens, repeats its last token.

        Values at padding are never read: a NaN there, which weights of 0 do not hide, can't reach a token.
        """
        if (columns := self.shared_columns(chunk)) is not None:
            return tensor_BN[:, columns]
        rows_R1, columns_RT = self._places(chunk)
        return tensor_BN[on_device(rows_R1, tensor_BN.device), on_device(columns_RT, tensor_BN.device)]

    def split(self, tensor_BN: torch.Tensor, chunks: Sequence[Chunk]) -> Sequence[torch.Tensor]:
        """Returns the parts that `gather` returns, for all chunks of a call in order. Autograd joins their gradients
        once; the gradient of each part of `gather` alone is as large as the whole tensor."""
        if all(self.shared_columns(chunk) is not None for chunk in chunks):
            return tensor_BN.split([chunk.width for chunk in chunks], dim=1)
        places = [self._places(chunk) for chunk in chunks]
        row_n = torch.cat([rows_R1.expand_as(columns_RT).flatten() for rows_R1, columns_RT in places])
        column_n = torch.cat([columns_RT.flatten() for _, columns_RT in places])
        gathered_n = tensor_BN[on_device(row_n, tensor_BN.device), on_device(column_n, tensor_BN.device)]
        parts = gathered_n.split([columns_RT.numel() for _, columns_RT in places])
        return [part_n.unflatten(0, columns_RT.shape) for part_n, (_, columns_RT) in zip(parts, places, strict=True)]

    def _places(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the row [R, 1] and the column [R, T] of each token of a chunk; after a row's tokens, of its last."""
        rows_R1, starts_R1, counts_R1 = torch.tensor([chunk.rows, chunk.starts, chunk.counts])[..., None]
        columns_RT = starts_R1 + torch.arange(chunk.width).minimum(counts_R1 - 1)
        return rows_R1, columns_RT if self.mask_BN is None else self.columns_BN[rows_R1, columns_RT]

    def last_token_indices(self) -> torch.Tensor:
        """Returns [B, N] on the CPU: the index of the row's last token up to each column; -1 before the first token."""
        if self.mask_BN is None:
            return torch.arange(self.num_columns).expand(self.batch_size, -1)
        return self.mask_BN.long().cumsum(1) - 1

    def next_labels(self, labels_BN: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """Returns [B, N]: at each token the label of the row's next token; `ignore_index` at all other columns."""
        targets_BN = torch.full_like(labels_BN, ignore_index)
        if self.mask_BN is None:
            targets_BN[:, :-1] = labels_BN[:, 1:]
            return targets_BN
        for row, length in enumerate(self.lengths):
            columns = self.columns_BN[row, :length].to(labels_BN.device)
            targets_BN[row, columns[:-1]] = labels_BN[row, columns[1:]]
        return targets_BN
