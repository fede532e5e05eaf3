"""Prefill: reads a long text into a cache, several segments in each call of the model.

Axes: B rows of a batch, N tokens of a text, C components of the control.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..hub.untrained import warn_if_untrained
from ..modeling import CondenseForCausalLM
from ..state.cache import FoldedCache
from ..state.cache_argument import CACHE, cache_of

TOKENS_PER_CALL = 4096  # enough to fill a device; the memory of a call does not depend on the length of the text
SEGMENTS_PER_CALL = 64  # enough for a wave to run most of its diagonals at full width


def columns_per_call(model: Any, num_tokens: int, num_rows: int = 1) -> int:
    """Returns the columns of a call that reads about `num_tokens` tokens: for folded models, whole segments."""
    length = getattr(model.config, "segment_length", 1)
    return length * max(1, num_tokens // (length * num_rows))


@torch.no_grad()
def prefill_calls(
    model: Callable[..., Any],
    input_ids: torch.Tensor,
    num_columns: int,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
) -> Iterator[tuple[slice, Any]]:
    """Reads `input_ids` [B, N], `num_columns` columns in each call; yields each call's columns and output.

    `model` is a causal language model, folded or stock, and has transformers' arguments. `attention_mask` [B, N] is for
    folded models, because they accept the mask of a call's own columns. The last output has the state
    (`cache`) and the logits of the next token.
    """
    for start in range(0, input_ids.shape[1], num_columns):
        columns = slice(start, start + num_columns)
        options = {} if attention_mask is None else {"attention_mask": attention_mask[:, columns]}
        output = model(input_ids[:, columns], use_cache=True, logits_to_keep=1, **{CACHE: cache}, **options)
        cache = cache_of(output)
        yield columns, output


def prefill(
    model: CondenseForCausalLM,
    input_ids: torch.Tensor,
    cache: FoldedCache | None = None,
    progress: Callable[[int], object] = lambda num_segments: None,
    control: torch.Tensor | None = None,
    restart_columns: bool = True,
) -> FoldedCache:
    """Returns the cache after `input_ids` [B, N], using memory that does not depend on N.

    `progress` is called with the number of segments read since its last call. `control` [B, C] is for each text, in a
    model with a depth block. To continue with `generate`, pass the next token and the cache. With
    `restart_columns=False` pass the whole text and one more token: penalties of repeated tokens then count them.
    """
    cache = FoldedCache(model.config) if cache is None else cache
    warn_if_untrained(model, cache.get_seq_length() + input_ids.shape[1])
    length = model.config.segment_length
    num_segments = max(SEGMENTS_PER_CALL, TOKENS_PER_CALL // (length * len(input_ids)))

    def on_device(ids_BT: torch.Tensor, **options: Any) -> Any:
        return model(ids_BT.to(model.device), control=control, **options)

    for columns, _ in prefill_calls(on_device, input_ids, length * num_segments, cache):
        progress(-(-input_ids[:, columns].shape[1] // length))
    # `generate` slices its input by the columns that a cache has seen, and copies a mask of that length for each token.
    if restart_columns:
        cache.restart_columns()
    return cache
