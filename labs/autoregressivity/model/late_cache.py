"""A cache for models that read a token later than they receive it.

Axes: B rows of a batch, N columns of an input (padding included), D hidden size.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache

from condense.state.cache_argument import CACHE, cache_of


class LateCache(Cache):
    """The state of one or more base models, and the tokens that not all of them have read.

    A base model reads all its unread tokens in one call when its output is needed.
    """

    def __init__(self, num_bases: int):
        super().__init__(layers=[])
        self.caches: list[Cache | None] = [None] * num_bases  # made by the base models
        self.num_read = [0] * num_bases  # columns
        self.num_dropped = 0  # columns that all have read
        self.kept_BN: torch.Tensor | None = None  # the columns after them
        self.last_hidden_BD: torch.Tensor | None = None  # of a model with several heads, at the start of its block

    def add(self, ids_BN: torch.Tensor) -> None:
        """Adds tokens. Raises `ValueError` if the cache holds a different number of texts."""
        if self.kept_BN is None:
            self.kept_BN = ids_BN[:, :0]
        if len(self.kept_BN) != len(ids_BN):
            raise ValueError(
                f"the cache holds {len(self.kept_BN)} texts and the input {len(ids_BN)}: pass the same rows again, or "
                "a new cache."
            )
        self.kept_BN = torch.cat([self.kept_BN, ids_BN], dim=1)

    def num_unread(self, number: int) -> int:
        """Returns the number of columns that a base model has not read."""
        return self.get_seq_length() - self.num_read[number]

    def read(self, number: int, base: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Makes a base model read its unread tokens; returns the final hidden state [B, D] at the last column.

        attention_mask [B, all columns so far].
        """
        assert self.kept_BN is not None
        output = base.base_model(
            input_ids=self.kept_BN[:, self.num_read[number] - self.num_dropped :],
            attention_mask=attention_mask,
            use_cache=True,
            **{CACHE: self.caches[number]},
        )
        self.caches[number], self.num_read[number] = cache_of(output), self.get_seq_length()
        unneeded = min(self.num_read) - self.num_dropped
        self.kept_BN, self.num_dropped = self.kept_BN[:, unneeded:], self.num_dropped + unneeded
        return output.last_hidden_state[:, -1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of input columns so far, padding included."""
        return self.num_dropped + (0 if self.kept_BN is None else self.kept_BN.shape[1])

    # transformers asks all layers, of which a cache of caches has none.

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_croppable(self) -> bool:
        return False
