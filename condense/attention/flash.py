"""The flash-attn package.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

import importlib

import torch

from .packed import durations_as_channels, packed_rows


def flash_attention(query_RHTE, key_RGKE, value_RGKE, mask, scale, dropout):
    """Calls flash-attn's kernels, whose causal mask is lower-right aligned.

    Durations are added as extra channels of queries and keys. Rows at different offsets of their segments are packed,
    each with the keys that it sees.
    """
    head_width = value_RGKE.shape[-1]
    if mask.log_duration_RK is not None:
        query_RHTE, key_RGKE, value_RGKE = durations_as_channels(
            query_RHTE, key_RGKE, value_RGKE, mask.log_duration_RK, scale
        )
    query_RTHE, key_RKGE, value_RKGE = (tensor.transpose(1, 2) for tensor in (query_RHTE, key_RGKE, value_RGKE))
    kernels = importlib.import_module("flash_attn")
    if mask.lower_right:
        output_RTHE = kernels.flash_attn_func(
            query_RTHE, key_RKGE, value_RKGE, dropout_p=dropout, softmax_scale=scale, causal=True
        )
        return output_RTHE.transpose(1, 2)[..., :head_width]

    rows = packed_rows(mask, query_RHTE.device)
    packed_qHE = kernels.flash_attn_varlen_func(
        query_RTHE[rows.row_q, rows.token_q],
        key_RKGE[rows.row_k, rows.key_k],
        value_RKGE[rows.row_k, rows.key_k],
        cu_seqlens_q=rows.borders_q,
        cu_seqlens_k=rows.borders_k,
        max_seqlen_q=rows.most_queries,
        max_seqlen_k=rows.most_keys,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=True,
    )
    output_RTHE = torch.zeros_like(query_RTHE).index_put((rows.row_q, rows.token_q), packed_qHE)
    return output_RTHE.transpose(1, 2)[..., :head_width]
