"""Copies of a cache's state: a snapshot, and the recording of the last tokens that `FoldedCache.crop` needs.

Axes: B rows of a batch, N recent tokens or columns, R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from dataclasses import dataclass

import torch

from ..durations import Timeline
from ..segmentation import Chunk, SegmentPositions

CROP_TOKENS = 512  # the last tokens that a recording cache can remove; drafts of assisted decoding are shorter


@dataclass(frozen=True)
class CacheSnapshot:
    """A copy of a `FoldedCache`'s state: see `FoldedCache.snapshot`."""

    made_for: dict
    buffers: list[list[torch.Tensor]]  # of each layer
    positions: SegmentPositions
    timeline: Timeline | None
    last_hidden_BD: torch.Tensor | None
    computed_in: tuple[torch.dtype, torch.device] | None
    num_columns: int


class Recording:
    """The data to remove up to `CROP_TOKENS` tokens: a copy of the state before each of the last rolls, the final
    hidden states of the last tokens, and the columns that held them.

    It begins after a token with the final hidden state `last_hidden_BD`, or before the first token.
    """

    def __init__(self, segment_length: int, last_hidden_BD: torch.Tensor | None):
        self.max_rolls = -(-CROP_TOKENS // segment_length)  # as many as `CROP_TOKENS` tokens can reach back to
        self.rolls: list[CacheSnapshot] = []
        self.hidden_BND = None if last_hidden_BD is None else last_hidden_BD[:, None]
        self.is_whole_text = last_hidden_BD is None
        self.columns: list[bool] = []  # false: padding in all rows
        self.rows_differ = False  # they cannot be cropped alike

    def add_roll(self, before_roll: CacheSnapshot) -> None:
        self.rolls = [*self.rolls, before_roll][-self.max_rolls :]

    def add_hidden(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> None:
        if not (chunk.all_rows and chunk.uniform and chunk.rectangular):
            self.rows_differ = True
            return
        recent = [] if self.hidden_BND is None else [self.hidden_BND]
        self.hidden_BND = torch.cat([*recent, hidden_RTD], dim=1)
        if self.hidden_BND.shape[1] > CROP_TOKENS + 1:
            self.hidden_BND = self.hidden_BND[:, -CROP_TOKENS - 1 :].clone()
            self.is_whole_text = False

    def add_columns(self, num_columns: int, mask_BN: torch.Tensor | None) -> None:
        """Records the columns of a finished call; `mask_BN` is false at padding."""
        if mask_BN is None:
            self.columns += [True] * num_columns
        elif bool((mask_BN == mask_BN[:1]).all()):
            self.columns += mask_BN[0].tolist()
        else:
            self.rows_differ = True
        self.columns = self.columns[-CROP_TOKENS:]

    def remove_columns(self, num_columns: int) -> int:
        """Removes the last columns; returns the number of tokens in them."""
        removed, self.columns = self.columns[-num_columns:], self.columns[:-num_columns]
        return sum(removed)

    def remove_hidden(self, num_tokens: int) -> torch.Tensor | None:
        """Returns the final hidden state [B, D] of the token before the removed ones; None before the first token."""
        assert self.hidden_BND is not None
        if num_tokens == self.hidden_BND.shape[1]:
            assert self.is_whole_text
            self.hidden_BND = None
            return None
        self.hidden_BND = self.hidden_BND[:, :-num_tokens]
        return self.hidden_BND[:, -1].clone()

    @property
    def tensors(self) -> list[torch.Tensor]:
        recent = [] if self.hidden_BND is None else [self.hidden_BND]
        return recent + [buffer for roll in self.rolls for buffers in roll.buffers for buffer in buffers]
