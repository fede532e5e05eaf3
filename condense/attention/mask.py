"""Which keys the queries of a step may see.

Axes: R rows, T queries, K keys.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..segmentation import Piece, on_device


@dataclass(frozen=True)
class Visibility:
    """Which keys a step's queries may see, and how much each weighs.

    For a uniform piece the keys end with the step's own: lower-right causal, no mask. Otherwise they are
    the buffer [memory L ; current L], of which row r's query t sees first_key[r] ... own_key[r] + t.
    """

    piece: Piece
    log_duration_RK: torch.Tensor | None = None

    @property
    def lower_right(self) -> bool:
        return self.piece.uniform

    @cached_property
    def first_key_R(self) -> torch.Tensor:
        return self.piece.segment_length - torch.tensor(self.piece.memory_lengths)

    @cached_property
    def own_key_R(self) -> torch.Tensor:
        """The key of each row's first query."""
        return self.piece.segment_length + torch.tensor(self.piece.filled)

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """[T, K] or [R, 1, T, K], true where a query may look."""
        keys_K = torch.arange(num_keys, device=device)
        queries_T1 = torch.arange(num_queries, device=device)[:, None]
        if self.lower_right:
            return keys_K <= queries_T1 + (num_keys - num_queries)
        first_R11 = on_device(self.first_key_R, device)[:, None, None]
        own_R11 = on_device(self.own_key_R, device)[:, None, None]
        return ((keys_K >= first_R11) & (keys_K <= own_R11 + queries_T1))[:, None]

    def bias(self, num_queries: int, num_keys: int, like: torch.Tensor) -> torch.Tensor:
        """The same as an additive float bias [R or 1, 1, T, K], log durations included."""
        mask = self.mask(num_queries, num_keys, like.device)
        bias = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
        if self.log_duration_RK is not None:
            bias = bias + self.log_duration_RK[:, None, None, :].to(like.dtype)
        return bias.masked_fill(~mask, float("-inf"))
