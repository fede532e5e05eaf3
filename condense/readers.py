"""What is taken from a step's final hidden states before they are dropped.

Axes: B rows, R rows taking part in a step, N columns of an input, T tokens of a step, K columns kept,
D model width, n tokens or places picked out.
"""

from collections.abc import Callable, Sequence

import torch

from .loss import cross_entropy_sum
from .segmentation import Alignment, Piece, on_device

IGNORE_INDEX = -100


class LossReader:
    """The summed cross-entropy of a step's tokens; only rows of hidden states with a label meet the head."""

    def __init__(self, head: Callable, vocab_size: int, alignment: Alignment, labels_BN: torch.Tensor, recompute: bool):
        self.head, self.vocab_size, self.alignment, self.recompute = head, vocab_size, alignment, recompute
        self.targets_BN = alignment.next_labels(labels_BN.cpu(), IGNORE_INDEX)
        self.targets_on_device_BN: torch.Tensor | None = None  # once a device is known
        self.num_targets = int((self.targets_BN != IGNORE_INDEX).sum())

    def read(self, hidden_RTD: torch.Tensor, piece: Piece) -> torch.Tensor:
        device = hidden_RTD.device
        if self.targets_on_device_BN is None:
            self.targets_on_device_BN = on_device(self.targets_BN, device)
        target_RT = self.alignment.take(self.targets_on_device_BN, piece)
        row_n, token_n = piece.valid
        counted = self.alignment.take(self.targets_BN, piece)[row_n, token_n] != IGNORE_INDEX
        if bool(counted.all()) and piece.rectangular:
            hidden_nD, target_n = hidden_RTD.flatten(0, 1), target_RT.flatten()
        else:
            places = on_device(row_n[counted], device), on_device(token_n[counted], device)
            hidden_nD, target_n = hidden_RTD[places], target_RT[places]
        return cross_entropy_sum(self.head, hidden_nD, target_n, self.vocab_size, self.recompute)

    def num_targets_of(self, piece: Piece) -> int:
        row_n, token_n = piece.valid
        return int((self.alignment.take(self.targets_BN, piece)[row_n, token_n] != IGNORE_INDEX).sum())

    def finish(self, losses: Sequence[torch.Tensor], num_items: int | torch.Tensor | None) -> torch.Tensor:
        """The mean over all targets, or the sum over `num_items`; 0 where there is no target."""
        if not losses:
            raise ValueError("the attention mask hides every token of the batch: there is no loss to take.")
        return torch.stack(list(losses)).sum() / (max(self.num_targets, 1) if num_items is None else num_items)


class HiddenReader:
    """The hidden states of the last `num_kept` columns; a column of padding shows its row's last token."""

    def __init__(self, alignment: Alignment, num_kept: int):
        self.token_BK = alignment.last_token()[:, -num_kept:]
        self.first_token = alignment.num_columns - num_kept if alignment.mask_BN is None else None

    def _places(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(r, k, t): kept column k of the step's row r is its token t."""
        offset_RK = self.token_BK[piece.rows] - torch.tensor(piece.starts)[:, None]
        r, k = ((offset_RK >= 0) & (offset_RK < torch.tensor(piece.counts)[:, None])).nonzero(as_tuple=True)
        return r, k, offset_RK[r, k]

    def read(self, hidden_RTD: torch.Tensor, piece: Piece) -> torch.Tensor:
        r, _, t = self._places(piece)
        if len(r) == 0:
            return hidden_RTD.new_empty(0, hidden_RTD.shape[-1])  # no view, which would keep the step alive
        if self.first_token is not None and piece.all_rows and piece.rectangular and len(set(piece.starts)) == 1:
            return hidden_RTD[:, max(self.first_token - piece.starts[0], 0) :].clone().flatten(0, 1)
        return hidden_RTD[on_device(r, hidden_RTD.device), on_device(t, hidden_RTD.device)]

    def finish(self, pieces: Sequence[Piece], hidden: Sequence[torch.Tensor], before_BD: torch.Tensor) -> torch.Tensor:
        """[B, K, D]; columns before a row's first token of this input show `before_BD`."""
        batch_size, num_kept = self.token_BK.shape
        kept_nD = before_BD.repeat_interleave(num_kept, dim=0)
        if pieces:
            places = []
            for piece in pieces:
                r, k, _ = self._places(piece)
                places.append(torch.tensor(piece.rows)[r] * num_kept + k)
            kept_nD = kept_nD.index_copy(0, on_device(torch.cat(places), kept_nD.device), torch.cat(list(hidden)))
        return kept_nD.unflatten(0, (batch_size, num_kept))
