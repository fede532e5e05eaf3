"""Attention to a window of the last keys and the text's first ones, as in StreamingLLM, in a stock model.

The first tokens (sinks) stand directly before the window: of W keys, S of them sinks, a query at token t >= W has
position W - 1, the sinks have 0 to S - 1, and the last W - S keys S to W - 1. Rotary positions depend on differences
alone, so only the products with sinks need a query at another position.

Axes: H query heads, G key/value heads, N tokens, T queries of a block, K keys that they see, S sinks, E head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from condense.hub.transformers_private import apply_rotary_pos_emb

NAME = "condense_window"
QUERIES = 512  # in a block
WINDOW_SINKS = 4  # StreamingLLM's


@contextmanager
def attend_to_window(model: Any, num_keys: int, num_sinks: int) -> Iterator[None]:
    """Makes all layers of a stock model attend to the last `num_keys` keys, the first `num_sinks` of a text among
    them. Each call must read whole texts without padding."""
    rotary = getattr(model, "rotary_emb", None) or model.model.rotary_emb
    attend = partial(window_attention, rotary=rotary, num_keys=num_keys, num_sinks=num_sinks)
    AttentionInterface.register(NAME, attend)  # no mask is registered, so transformers makes none
    before, model.config._attn_implementation = model.config._attn_implementation, NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def window_attention(
    module: Any, query_1HNE, key_1GNE, value_1GNE, attention_mask: Any, *, rotary: Any, num_keys: int, num_sinks: int,
    scaling: float, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Returns the output [1, N, H, E]; queries and keys are rotated to the positions of their tokens.

    A query has its own position in the first E dimensions and the one before sinks in the others; keys are zero in the
    half that is not theirs.
    """
    num_tokens, parts = query_1HNE.shape[2], []
    before_1HNE = _moved_back(query_1HNE, rotary, num_keys)
    sink_1GSE, sink_value_1GSE = key_1GNE[:, :, :num_sinks], value_1GNE[:, :, :num_sinks]
    for first in range(0, num_tokens, QUERIES):
        end = min(first + QUERIES, num_tokens)
        seen = slice(max(num_sinks, first + 1 - (num_keys - num_sinks)), max(end, num_sinks))
        own_1GKE = key_1GNE[:, :, seen]
        key_1GKE = torch.cat([F.pad(own_1GKE, (0, own_1GKE.shape[-1])), F.pad(sink_1GSE, (sink_1GSE.shape[-1], 0))], 2)
        value_1GKE = torch.cat([value_1GNE[:, :, seen], sink_value_1GSE], dim=2)
        query_1HTE = torch.cat([query_1HNE[:, :, first:end], before_1HNE[:, :, first:end]], dim=-1)
        token_T1 = torch.arange(first, end, device=query_1HNE.device)[:, None]
        token_K = torch.arange(seen.start, seen.stop, device=query_1HNE.device)
        in_window_TK = (token_K <= token_T1) & (token_K > token_T1 - (num_keys - num_sinks))
        is_read_TS = torch.arange(num_sinks, device=query_1HNE.device) <= token_T1
        mask_TK = torch.cat([in_window_TK, is_read_TS], dim=1)
        parts.append(_attend(query_1HTE, key_1GKE, value_1GKE, mask_TK, scaling))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend(query_1HTE, key_1GKE, value_1GKE, mask_TK, scaling: float) -> torch.Tensor:
    """Returns the output [1, H, T, E] of queries and keys that are twice as wide as the values."""
    padded_1GKE = F.pad(value_1GKE, (0, query_1HTE.shape[-1] - value_1GKE.shape[-1]))
    output = F.scaled_dot_product_attention(
        query_1HTE, key_1GKE, padded_1GKE, attn_mask=mask_TK, scale=scaling, enable_gqa=True
    )
    return output[..., : value_1GKE.shape[-1]]


def _moved_back(query_1HNE: torch.Tensor, rotary: Any, num_keys: int) -> torch.Tensor:
    """Returns the queries at position `num_keys` - 1 at most."""
    token_N = torch.arange(query_1HNE.shape[2], device=query_1HNE.device)
    cos_1NE, sin_1NE = rotary(query_1HNE, (-(token_N - num_keys + 1).clamp(min=0))[None])
    scaling = rotary.attention_scaling  # is in the queries already
    return apply_rotary_pos_emb(query_1HNE, query_1HNE[:, :1], cos_1NE / scaling, sin_1NE / scaling)[0]
