"""The input of the first layer, with gradients for several chunks at once.

Embeddings need no memory, and each use's gradient is as large as all weights, so chunks are embedded together. A call
of an embedding with hooks, or of another module in its place, has the whole input, as in a stock model: the noise of
NEFTune depends on the length of the text.

Axes: B rows of a batch, R rows of a chunk, N columns of an input (padding included), T tokens of a chunk, D hidden
size, x tokens of consecutive chunks.
"""

import copy
from collections import deque
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import nn

from .ops.shared_weights import summed_embedding, sums_of
from .ops.transforms import hidden_dtype, is_plain
from .segmentation import Chunk, UnpaddedBatch

EMBEDDED_TOKENS = 2**13  # at once, padding included: embeddings exist before they are needed
# Hooks of transformers and PEFT, for gradient checkpointing, that only make the output require gradients.
MARKS = ("make_inputs_require_grads", "make_inputs_require_grad")


def is_pointwise(embedding: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """Returns whether an embedding is known to treat each token alone."""
    return is_plain(embedding, nn.Embedding, besides=MARKS)


def embed(embedding: nn.Embedding, ids_x: torch.Tensor) -> torch.Tensor:
    """Returns the hidden states of ids, for one of the embedding's several uses."""
    summable = embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse
    sums = sums_of(embedding.weight) if summable else None
    return as_hidden(embedding(ids_x) if sums is None else summed_embedding(sums, ids_x, embedding))


def as_hidden(embeddings_xD: torch.Tensor) -> torch.Tensor:
    """Returns embeddings in the dtype of hidden states."""
    return embeddings_xD.to(hidden_dtype(embeddings_xD.dtype, embeddings_xD.device))


class ChunkEmbedder:
    """Embeds the requested chunks in the order of `chunks`, which are all of a call; chunks may be left out.

    `inputs` are token ids [B, N], or embeddings [B, N, D], which are used unchanged and do not need an `embedding`.
    """

    def __init__(
        self, embedding: nn.Module | None, inputs: torch.Tensor, batch: UnpaddedBatch, chunks: Iterable[Chunk]
    ):
        self.embedding, self.batch = embedding, batch
        self._upcoming = deque(chunks)
        self._embedded: deque[tuple[Chunk, torch.Tensor]] = deque()
        if not inputs.is_floating_point() and not is_pointwise(embedding):
            assert embedding is not None, "a model without an embedding layer needs embeddings"
            inputs = embedding(inputs)
        self.inputs = as_hidden(inputs) if inputs.is_floating_point() else inputs
        self._parts: dict[tuple[int, ...], torch.Tensor] = {}
        if self.inputs.requires_grad and torch.is_grad_enabled():
            parts = batch.split(self.inputs, list(self._upcoming))
            self._parts = {tuple(chunk.starts): part for chunk, part in zip(self._upcoming, parts, strict=True)}

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the hidden states."""
        if self.inputs.is_floating_point():
            return self.inputs.dtype
        assert isinstance(self.embedding, nn.Embedding)
        return hidden_dtype(self.embedding.weight.dtype, self.inputs.device)

    def of(self, chunks: Iterable[Chunk]) -> "ChunkEmbedder":
        """Returns an embedder for these chunks of the call only."""
        part = copy.copy(self)
        part._upcoming, part._embedded = deque(chunks), deque()
        return part

    def __call__(self, chunk: Chunk) -> torch.Tensor:
        """Returns the input [R, T, D] of the first layer."""
        if self.inputs.is_floating_point():
            part_RTD = self._parts.get(tuple(chunk.starts))  # no other chunk of a call begins there
            return self.batch.gather(self.inputs, chunk) if part_RTD is None else part_RTD
        while self._embedded:
            embedded, hidden_RTD = self._embedded.popleft()
            if embedded.starts == chunk.starts:
                return hidden_RTD
        while self._upcoming[0].starts != chunk.starts:
            self._upcoming.popleft()
        self._embed_next()
        return self._embedded.popleft()[1]

    def _embed_next(self) -> None:
        """Embeds the next chunk and, with gradients, all directly following chunks with the same rows that fit."""
        assert isinstance(self.embedding, nn.Embedding)
        first = self._upcoming[0]
        room = max(EMBEDDED_TOKENS // len(first.rows) if torch.is_grad_enabled() else 0, first.width)
        block = []
        while self._upcoming and self._upcoming[0].rows == first.rows and self._upcoming[0].width <= room:
            block.append(self._upcoming.popleft())
            room -= block[-1].width
        parts = [self.batch.gather(self.inputs, chunk) for chunk in block]
        if len(parts) == 1:
            self._embedded.append((first, embed(self.embedding, parts[0])))
            return
        hidden_RxD = embed(self.embedding, torch.cat(parts, dim=1))
        self._embedded.extend(zip(block, hidden_RxD.split([chunk.width for chunk in block], dim=1), strict=True))
