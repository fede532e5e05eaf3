"""The hidden states of the columns whose logits a call returns, chunk by chunk.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, C columns kept, D hidden size,
n selected tokens.
"""

from collections.abc import Sequence

import torch

from .segmentation import Chunk, UnpaddedBatch, on_device


class HiddenStateAccumulator:
    """The hidden states of the last `num_kept` columns; a column of padding has those of its row's last token."""

    def __init__(self, batch: UnpaddedBatch, num_kept: int):
        self.token_BC = batch.last_token_indices()[:, -num_kept:]
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
        self, chunks: Sequence[Chunk], hidden: Sequence[torch.Tensor], previous_last_hidden_BD: torch.Tensor
    ) -> torch.Tensor:
        """[B, C, D]; columns before a row's first token of this input have `previous_last_hidden_BD`."""
        batch_size, num_kept = self.token_BC.shape
        kept_nD = previous_last_hidden_BD.repeat_interleave(num_kept, dim=0)
        if chunks:
            indices = []
            for chunk in chunks:
                r, c, _ = self._selection(chunk)
                indices.append(torch.tensor(chunk.rows)[r] * num_kept + c)
            kept_nD = kept_nD.index_copy(0, on_device(torch.cat(indices), kept_nD.device), torch.cat(list(hidden)))
        return kept_nD.unflatten(0, (batch_size, num_kept))
