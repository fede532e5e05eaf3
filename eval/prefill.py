"""Prefill in chunks, for folded and stock models alike.

Axes: B rows, N columns of an input.
"""

from collections.abc import Callable
from typing import Any

import torch


def columns_per_call(model: Any, num_tokens: int, num_rows: int = 1) -> int:
    """The columns of a call that reads about `num_tokens` tokens: whole segments of a folded model, at least one."""
    length = getattr(model.config, "segment_length", 1)
    return length * max(1, num_tokens // (length * num_rows))


@torch.no_grad()
def prefill(
    model: Callable[..., Any],
    ids_BN: torch.Tensor,
    num_columns: int,
    is_real_BN: torch.Tensor | None = None,
    cache: Any = None,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> Any:
    """The cache after `ids_BN`, which are read `num_columns` columns at a time.

    `model` takes the arguments of a causal language model of transformers. `is_real_BN` is False at padding. `cache` is
    an empty one, or None for the model's own. `progress` is called with the number of tokens read since its last call.
    """
    for start in range(0, ids_BN.shape[1], num_columns):
        part_BN = ids_BN[:, start : start + num_columns]
        end, num_tokens, mask_BN = start + part_BN.shape[1], part_BN.numel(), None
        if is_real_BN is not None:
            num_tokens, mask_BN = int(is_real_BN[:, start:end].sum()), is_real_BN[:, :end]
        output = model(part_BN, attention_mask=mask_BN, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        progress(num_tokens)
    return cache
