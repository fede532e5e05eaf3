"""The input of the first layer, with gradients for several chunks at once.

Embeddings need no memory, and each use's gradient is as large as all weights, so chunks are embedded together.

Axes: B rows of a batch, R rows of a chunk, N columns of an input (padding included), T tokens of a chunk, D hidden
size, x tokens of consecutive chunks.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

from .segmentation import Chunk, UnpaddedBatch
from .shared_weights import summed_embedding, sums_of

EMBEDDED_TOKENS = 2**13  # at once, padding included: embeddings exist before they are needed


class Embedding(nn.Embedding):
    def forward(self, ids_x: torch.Tensor) -> torch.Tensor:
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        sums = sums_of(self.weight) if plain else None
        return super().forward(ids_x) if sums is None else summed_embedding(sums, ids_x, self)


class ChunkEmbedder:
    """Embeds the requested chunks in the order of `chunks`; chunks may be left out.

    `inputs` are token ids [B, N], or embeddings [B, N, D], which are used unchanged and do not need an `embedding`.
    """

    def __init__(
        self, embedding: nn.Module | None, inputs: torch.Tensor, batch: UnpaddedBatch, chunks: Iterable[Chunk]
    ):
        self.embedding, self.inputs, self.batch = embedding, inputs, batch
        self._upcoming = deque(chunks)
        self._embedded: deque[tuple[Chunk, torch.Tensor]] = deque()

    def of(self, chunks: Iterable[Chunk]) -> "ChunkEmbedder":
        """Returns an embedder for these chunks of the call only."""
        return ChunkEmbedder(self.embedding, self.inputs, self.batch, chunks)

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        """Returns the input [R, T, D] of the first layer."""
        if self.inputs.is_floating_point():
            return self.batch.gather(self.inputs, chunk)
        while self._embedded:
            embedded, hidden_RTD = self._embedded.popleft()
            if embedded.starts == chunk.starts:  # no other chunk of a call begins there
                return hidden_RTD
        while self._upcoming[0].starts != chunk.starts:
            self._upcoming.popleft()
        self._embed_next()
        return self._embedded.popleft()[1]

    def _embed_next(self) -> None:
        """Embeds the next chunk and, with gradients, all directly following chunks with the same rows that fit."""
        assert self.embedding is not None
        first = self._upcoming[0]
        # Under ZeRO-3 all ranks must use the weight equally often, whichever rows end first.
        is_single = not torch.is_grad_enabled() or any(hasattr(one, "ds_id") for one in self.embedding.parameters())
        room = max(0 if is_single else EMBEDDED_TOKENS // len(first.rows), first.width)
        block = []
        while self._upcoming and self._upcoming[0].rows == first.rows and self._upcoming[0].width <= room:
            block.append(self._upcoming.popleft())
            room -= block[-1].width
        parts = [self.batch.gather(self.inputs, chunk) for chunk in block]
        if len(parts) == 1:
            self._embedded.append((first, self._embed(parts[0])))
            return
        hidden_RxD = self._embed(torch.cat(parts, dim=1))
        self._embedded.extend(zip(block, hidden_RxD.split([chunk.width for chunk in block], dim=1), strict=True))

    def _embed(self, ids_Rx: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None, "a model without an embedding layer needs embeddings"
        return self.embedding(ids_Rx)
