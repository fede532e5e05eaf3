"""How a batch of texts is cut into steps, each at most up to every row's next segment border.

Rows of a padded batch are aligned to their own first token, so that a row's borders, and with them
its answer, do not depend on its neighbours. All of this is counted on the host, once per call.

Axes: B rows, R rows taking part in a step, N columns of an input, T tokens of a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of what was counted on the host; the host does not wait for the device to take it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Piece:
    """What one step takes: `counts[r]` tokens of row `rows[r]`, from its `starts[r]`-th real token on.

    `filled[r]` tokens of the row's current segment came before them, and `segments[r]` whole segments.
    """

    batch_size: int
    segment_length: int
    rows: list[int]
    starts: list[int]
    counts: list[int]
    filled: list[int]
    segments: list[int]

    @property
    def width(self) -> int:
        return max(self.counts)

    @property
    def all_rows(self) -> bool:
        return len(self.rows) == self.batch_size

    @property
    def rectangular(self) -> bool:
        """All rows take equally many tokens."""
        return len(set(self.counts)) == 1

    @property
    def uniform(self) -> bool:
        """All rows stand at the same place of their segment: attention needs no mask but the causal one."""
        return len(set(self.filled)) == 1 and len({count > 0 for count in self.segments}) == 1

    @property
    def memory_lengths(self) -> list[int]:
        return [self.segment_length if count else 0 for count in self.segments]

    @property
    def visible_keys(self) -> slice:
        """Of the buffer [memory L ; current L], what a uniform piece's queries may see."""
        assert self.uniform
        return slice(self.segment_length - self.memory_lengths[0], self.segment_length + self.filled[0] + self.width)

    @cached_property
    def valid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(r, t) of every token taken; the others only fill the rectangle [R, T]."""
        offsets_T = torch.arange(self.width)
        row_n, token_n = (offsets_T < torch.tensor(self.counts)[:, None]).nonzero(as_tuple=True)
        return row_n, token_n

    @property
    def completed(self) -> list[int]:
        """The r whose segment this step completes."""
        return [r for r, count in enumerate(self.counts) if self.filled[r] + count == self.segment_length]


class Cursor:
    """Where each row stands: tokens in its current segment, and segments completed before."""

    def __init__(self, batch_size: int, segment_length: int):
        self.segment_length = segment_length
        self.filled = [0] * batch_size
        self.segments = [0] * batch_size

    def pieces(self, lengths: list[int]) -> Iterator[Piece]:
        """Cuts `lengths[b]` further tokens of each row into pieces; moves on when the next one is asked for."""
        taken = [0] * len(lengths)
        while rows := [b for b, length in enumerate(lengths) if taken[b] < length]:
            piece = Piece(
                batch_size=len(lengths),
                segment_length=self.segment_length,
                rows=rows,
                starts=[taken[b] for b in rows],
                counts=[min(self.segment_length - self.filled[b], lengths[b] - taken[b]) for b in rows],
                filled=[self.filled[b] for b in rows],
                segments=[self.segments[b] for b in rows],
            )
            yield piece
            for b, count in zip(rows, piece.counts, strict=True):
                taken[b] += count
                self.filled[b] += count
                if self.filled[b] == self.segment_length:
                    self.filled[b] = 0
                    self.segments[b] += 1

    def select(self, rows_B: list[int]) -> None:
        """Keeps and repeats rows, as beam search does."""
        self.filled = [self.filled[b] for b in rows_B]
        self.segments = [self.segments[b] for b in rows_B]


class Alignment:
    """The real tokens of a batch, row by row, whatever side the padding is on.

    `mask_BN` (on the host) is true at real tokens; None means that all are real.
    """

    def __init__(self, batch_size: int, num_columns: int, mask_BN: torch.Tensor | None):
        self.batch_size, self.num_columns = batch_size, num_columns
        self.mask_BN = None if mask_BN is None or bool(mask_BN.all()) else mask_BN.bool()
        if self.mask_BN is None:
            self.lengths = [num_columns] * batch_size
        else:
            self.lengths = self.mask_BN.sum(1).tolist()
            # Column of each row's n-th real token; whatever follows the last one only fills up.
            self.columns_BN = self.mask_BN.logical_not().byte().argsort(dim=1, stable=True)

    def take(self, tensor_BN: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The piece's part [R, T, ...] of a tensor [B, N, ...]."""
        if self.mask_BN is None and piece.all_rows and piece.rectangular and len(set(piece.starts)) == 1:
            return tensor_BN[:, piece.starts[0] : piece.starts[0] + piece.width]
        rows_R1 = torch.tensor(piece.rows)[:, None]
        columns_RT = torch.tensor(piece.starts)[:, None] + torch.arange(piece.width)
        columns_RT = columns_RT.clamp(max=self.num_columns - 1)
        if self.mask_BN is not None:
            columns_RT = self.columns_BN[rows_R1, columns_RT]
        return tensor_BN[on_device(rows_R1, tensor_BN.device), on_device(columns_RT, tensor_BN.device)]

    def last_token(self) -> torch.Tensor:
        """[B, N]: which of its row's real tokens is the last one up to each column; -1 where none is."""
        if self.mask_BN is None:
            return torch.arange(self.num_columns).expand(self.batch_size, -1)
        return self.mask_BN.long().cumsum(1) - 1

    def next_labels(self, labels_BN: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """Per column the label of the row's next real token; nothing follows the last one."""
        targets_BN = torch.full_like(labels_BN, ignore_index)
        if self.mask_BN is None:
            targets_BN[:, :-1] = labels_BN[:, 1:]
            return targets_BN
        for row, length in enumerate(self.lengths):
            columns = self.columns_BN[row, :length].to(labels_BN.device)
            targets_BN[row, columns[:-1]] = labels_BN[row, columns[1:]]
        return targets_BN
