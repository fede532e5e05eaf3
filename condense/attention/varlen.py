"""torch's own flash kernel for rows of any length (CUDA): without mask, bias or extra package.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension; q and k number the queries and the
keys of all rows.
"""

import inspect
from functools import cache
from typing import Any

import torch

from .packed import borders_of, durations_as_channels, packed_rows

CAUSAL = (-1, 0)  # the window of a query: all keys up to its own, aligned to the lower right


def varlen_attention(query_RHTE, key_RGKE, value_RGKE, mask, scale, dropout):
    """Packs rows one after another. Durations are added as extra channels of queries and keys."""
    assert not dropout
    head_width = value_RGKE.shape[-1]
    if mask.log_duration_RK is not None:
        query_RHTE, key_RGKE, value_RGKE = durations_as_channels(
            query_RHTE, key_RGKE, value_RGKE, mask.log_duration_RK, scale
        )
    query_RTHE, key_RKGE, value_RKGE = (tensor.transpose(1, 2) for tensor in (query_RHTE, key_RGKE, value_RGKE))
    (num_rows, num_queries), num_keys, device = query_RTHE.shape[:2], key_RKGE.shape[1], query_RHTE.device
    if mask.lower_right:
        packed_qHE = _kernel(
            query_RTHE.flatten(0, 1),
            key_RKGE.flatten(0, 1),
            value_RKGE.flatten(0, 1),
            borders_of([num_queries] * num_rows, device),
            borders_of([num_keys] * num_rows, device),
            num_queries,
            num_keys,
            scale,
        )
        return packed_qHE.unflatten(0, (num_rows, num_queries)).transpose(1, 2)[..., :head_width]

    rows = packed_rows(mask, device)
    packed_qHE = _kernel(
        query_RTHE[rows.row_q, rows.token_q],
        key_RKGE[rows.row_k, rows.key_k],
        value_RKGE[rows.row_k, rows.key_k],
        rows.borders_q,
        rows.borders_k,
        rows.most_queries,
        rows.most_keys,
        scale,
    )
    output_RTHE = torch.zeros_like(query_RTHE).index_put((rows.row_q, rows.token_q), packed_qHE)
    return output_RTHE.transpose(1, 2)[..., :head_width]


def _kernel(query_qHE, key_kGE, value_kGE, borders_q, borders_k, most_queries: int, most_keys: int, scale: float):
    groups = query_qHE.shape[1] // key_kGE.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 and _takes_groups() else {}
    if groups > 1 and not options:  # torch 2.11
        key_kGE, value_kGE = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_kGE, value_kGE))
    return torch_varlen().varlen_attn(
        query_qHE, key_kGE, value_kGE, borders_q, borders_k, most_queries, most_keys, scale=scale, window_size=CAUSAL,
        **options,
    )  # fmt: skip


def torch_varlen():
    from torch.nn.attention import varlen

    return varlen


@cache
def _takes_groups() -> bool:
    return "enable_gqa" in inspect.signature(torch_varlen().varlen_attn).parameters
