"""The evaluations of a vector field at each token of a call.

Axes: B rows of a batch, N columns of an input, R rows of a chunk, T tokens of a chunk.
"""

import torch

from .segmentation import Chunk, UnpaddedBatch, on_device


class EvaluationCounts:
    """Counts by chunk. A chunk that gradient checkpointing runs twice counts once."""

    def __init__(self, batch: UnpaddedBatch, device: torch.device):
        self.batch, self.device = batch, device
        self.counts: dict[tuple[int, ...], tuple[Chunk, int | torch.Tensor]] = {}

    def set(self, chunk: Chunk, num_evaluations: int | torch.Tensor) -> None:
        """The evaluations of a chunk: [R, T], or one number for all of its tokens."""
        self.counts[(*chunk.rows, *chunk.starts)] = chunk, num_evaluations

    def collect(self) -> torch.Tensor | None:
        """[B, N] on the device of the input, 0 at padding; None if there was no vector field."""
        if not self.counts:
            return None
        shape, device = (self.batch.batch_size, self.batch.num_columns), self.device
        collected_BN = torch.zeros(shape, dtype=torch.long, device=device)
        for chunk, counts in self.counts.values():
            row_n, token_n = chunk.token_indices
            own_row_n = torch.tensor(chunk.rows)[row_n]
            column_n = torch.tensor(chunk.starts)[row_n] + token_n
            if self.batch.mask_BN is not None:
                column_n = self.batch.columns_BN[own_row_n, column_n]
            if isinstance(counts, torch.Tensor):
                counts = counts.to(device)[on_device(row_n, device), on_device(token_n, device)]
            collected_BN[on_device(own_row_n, device), on_device(column_n, device)] = counts
        return collected_BN
