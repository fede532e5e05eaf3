"""The keys that each query of a chunk sees.

Axes: R rows of a chunk, T queries, K keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from ..segmentation import Chunk, on_device


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query of a chunk sees, and the weight of each key.

    The keys of a uniform chunk end with its own tokens: the mask is lower-right causal. Otherwise the keys are the
    whole buffer [memory L ; current L], and query t of row r sees keys `first_visible_key_R[r]` to
    `first_query_key_R[r] + t`.
    """

    chunk: Chunk
    log_duration_RK: torch.Tensor | None = None
    # Masks made so far. Masks of uniform chunks depend only on the numbers of queries and keys, and serve a whole call;
    # others serve all layers. None under gradient checkpointing, which would keep them until the backward pass.
    shared: dict[tuple[Any, ...], torch.Tensor] | None = field(default=None, compare=False, repr=False)
    _own: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def lower_right(self) -> bool:
        return self.chunk.uniform

    @cached_property
    def first_visible_key_R(self) -> torch.Tensor:
        return self.chunk.segment_length - torch.tensor(self.chunk.memory_lengths)

    @cached_property
    def first_query_key_R(self) -> torch.Tensor:
        """The index of the key of each row's first query."""
        return self.chunk.segment_length + torch.tensor(self.chunk.offsets)

    def boolean(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """Returns a mask [T, K] or [R, 1, T, K], true for each key that a query sees."""
        key = num_queries, num_keys, device
        if self.lower_right:
            return self._get_or_make(key, partial(_causal, num_queries, num_keys, device))
        return self._get_or_make(key, partial(self._visible, num_queries, num_keys, device))

    def additive(self, num_queries: int, num_keys: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a bias [T, K] or [R, 1, T, K] on scores: log durations, and -inf at keys that are not seen."""
        make = partial(self._additive, num_queries, num_keys, like)
        return self._get_or_make((num_queries, num_keys, like.device, like.dtype), make)

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Small results for the chunk, computed for its first layer and kept for the others."""
        if key not in self._own:
            self._own[key] = make()
        return self._own[key]

    def _get_or_make(self, key: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns one tensor for all layers and, if it depends only on the key, for all chunks of a call."""
        if self.shared is None:
            return make()
        made = self.shared if self.lower_right and self.log_duration_RK is None else self._own
        if key not in made:
            made[key] = make()
        return made[key]

    def _visible(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        keys_K = torch.arange(num_keys, device=device)
        queries_T1 = torch.arange(num_queries, device=device)[:, None]
        first_R11 = on_device(self.first_visible_key_R, device)[:, None, None]
        own_R11 = on_device(self.first_query_key_R, device)[:, None, None]
        return ((keys_K >= first_R11) & (keys_K <= own_R11 + queries_T1))[:, None]

    def _additive(self, num_queries: int, num_keys: int, like: torch.Tensor) -> torch.Tensor:
        seen = self.boolean(num_queries, num_keys, like.device)
        bias = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        if self.log_duration_RK is not None:
            bias = bias + self.log_duration_RK[:, None, None, :].to(like.dtype)
        return bias.masked_fill(~seen, float("-inf"))


def _causal(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
