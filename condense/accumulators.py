"""The parts of a chunk's final hidden states that outlive the chunk: its loss, and the hidden states of kept columns.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, C columns kept, D hidden size,
n selected tokens.
"""

from collections.abc import Callable, Sequence

import torch

from .configuration import IGNORE_INDEX
from .loss import cross_entropy_sum
from .segmentation import Chunk, UnpaddedBatch, on_device


class LossAccumulator:
    """The summed cross-entropy of each chunk, and the loss of the whole batch."""

    def __init__(self, head: Callable, vocab_size: int, batch: UnpaddedBatch, labels_BN: torch.Tensor, recompute: bool):
        self.head, self.vocab_size, self.batch, self.recompute = head, vocab_size, batch, recompute
        self.targets_BN = batch.next_labels(labels_BN.cpu(), IGNORE_INDEX)
        self.targets_on_device_BN: torch.Tensor | None = None  # copied once the device is known
        self.num_targets = int((self.targets_BN != IGNORE_INDEX).sum())

    def chunk_loss(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The sum over the chunk's targets; the head sees only hidden states that have a target."""
        device = hidden_RTD.device
        if self.targets_on_device_BN is None:
            self.targets_on_device_BN = on_device(self.targets_BN, device)
        target_RT = self.batch.gather(self.targets_on_device_BN, chunk)
        row_n, token_n = chunk.valid
        counted = self.batch.gather(self.targets_BN, chunk)[row_n, token_n] != IGNORE_INDEX
        if bool(counted.all()) and chunk.rectangular:
            hidden_nD, target_n = hidden_RTD.flatten(0, 1), target_RT.flatten()
        else:
            selected = on_device(row_n[counted], device), on_device(token_n[counted], device)
            hidden_nD, target_n = hidden_RTD[selected], target_RT[selected]
        return cross_entropy_sum(self.head, hidden_nD, target_n, self.vocab_size, self.recompute)

    def num_targets_of(self, chunk: Chunk) -> int:
        row_n, token_n = chunk.valid
        return int((self.batch.gather(self.targets_BN, chunk)[row_n, token_n] != IGNORE_INDEX).sum())

    def batch_loss(self, chunk_losses: Sequence[torch.Tensor], num_items: int | torch.Tensor | None) -> torch.Tensor:
        """The mean over all targets, or the sum over `num_items`; 0 where there is no target."""
        if not chunk_losses:
            raise ValueError("the attention mask hides every token of the batch: there is no loss to compute.")
        return torch.stack(list(chunk_losses)).sum() / (max(self.num_targets, 1) if num_items is None else num_items)


class HiddenStateAccumulator:
    """The hidden states of the last `num_kept` columns; a column of padding has those of its row's last token."""

    def __init__(self, batch: UnpaddedBatch, num_kept: int):
        self.token_BC = batch.last_token()[:, -num_kept:]
        self.first_token = batch.num_columns - num_kept if batch.mask_BN is None else None

    def _selection(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(r, c, t): kept column c of the chunk's row r is its token t."""
        token_RC = self.token_BC[chunk.rows] - torch.tensor(chunk.starts)[:, None]
        r, c = ((token_RC >= 0) & (token_RC < torch.tensor(chunk.counts)[:, None])).nonzero(as_tuple=True)
        return r, c, token_RC[r, c]

    def chunk_hidden(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """[n, D]: the hidden states of the chunk's tokens that kept columns have."""
        r, _, t = self._selection(chunk)
        if len(r) == 0:
            return hidden_RTD.new_empty(0, hidden_RTD.shape[-1])  # a view would keep all hidden states alive
        if self.first_token is not None and chunk.all_rows and chunk.rectangular and len(set(chunk.starts)) == 1:
            return hidden_RTD[:, max(self.first_token - chunk.starts[0], 0) :].clone().flatten(0, 1)
        return hidden_RTD[on_device(r, hidden_RTD.device), on_device(t, hidden_RTD.device)]

    def batch_hidden(
        self, chunks: Sequence[Chunk], hidden: Sequence[torch.Tensor], earlier_BD: torch.Tensor
    ) -> torch.Tensor:
        """[B, C, D]; columns before a row's first token of this input have `earlier_BD`."""
        batch_size, num_kept = self.token_BC.shape
        kept_nD = earlier_BD.repeat_interleave(num_kept, dim=0)
        if chunks:
            indices = []
            for chunk in chunks:
                r, c, _ = self._selection(chunk)
                indices.append(torch.tensor(chunk.rows)[r] * num_kept + c)
            kept_nD = kept_nD.index_copy(0, on_device(torch.cat(indices), kept_nD.device), torch.cat(list(hidden)))
        return kept_nD.unflatten(0, (batch_size, num_kept))
