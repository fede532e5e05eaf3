"""The flash-attn package.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

import importlib

import torch
import torch.nn.functional as F

from ..segmentation import on_device


def flash_attention(query_RHTE, key_RGKE, value_RGKE, mask, scale, dropout):
    """flash-attn's kernels, whose causal mask is lower-right aligned.

    Durations enter as further channels of queries and keys; rows at different offsets of their segments are packed,
    each with the keys that it sees.
    """
    head_width = value_RGKE.shape[-1]
    if mask.log_duration_RK is not None:
        query_RHTE, key_RGKE, value_RGKE = _durations_as_channels(
            query_RHTE, key_RGKE, value_RGKE, mask.log_duration_RK, scale
        )
    query_RTHE, key_RKGE, value_RKGE = (tensor.transpose(1, 2) for tensor in (query_RHTE, key_RGKE, value_RGKE))
    kernels = flash_attention_kernels()
    if mask.lower_right:
        output_RTHE = kernels.flash_attn_func(
            query_RTHE, key_RKGE, value_RKGE, dropout_p=dropout, softmax_scale=scale, causal=True
        )
        return output_RTHE.transpose(1, 2)[..., :head_width]

    chunk, device = mask.chunk, query_RHTE.device
    row_q, token_q = (on_device(index, device) for index in chunk.token_indices)
    key_counts = [
        memory + offset + count
        for memory, offset, count in zip(chunk.memory_lengths, chunk.offsets, chunk.counts, strict=True)
    ]
    offsets_K = torch.arange(max(key_counts))
    row_k, offset_k = (offsets_K < torch.tensor(key_counts)[:, None]).nonzero(as_tuple=True)
    key_k = on_device(mask.first_visible_key_R[row_k] + offset_k, device)
    row_k = on_device(row_k, device)
    packed_qHE = kernels.flash_attn_varlen_func(
        query_RTHE[row_q, token_q],
        key_RKGE[row_k, key_k],
        value_RKGE[row_k, key_k],
        cu_seqlens_q=_boundaries(chunk.counts, device),
        cu_seqlens_k=_boundaries(key_counts, device),
        max_seqlen_q=max(chunk.counts),
        max_seqlen_k=max(key_counts),
        dropout_p=dropout,
        softmax_scale=scale,
        causal=True,
    )
    output_RTHE = torch.zeros_like(query_RTHE).index_put((row_q, token_q), packed_qHE)
    return output_RTHE.transpose(1, 2)[..., :head_width]


def flash_attention_kernels():
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise ValueError(
            "attn_implementation='flash_attention_2' needs the flash-attn package: install the 'flash' extra, or use "
            "'sdpa', which holds a flash kernel of its own."
        ) from error


def _boundaries(counts: list[int], device: torch.device) -> torch.Tensor:
    return on_device(F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int(), device)


def _durations_as_channels(query_RHTE, key_RGKE, value_RGKE, log_duration_RK, scale):
    """Adds log d to every score through 8 further channels (the kernels want multiples of 8).

    The bias is split over three of them, so that it keeps float32's precision in bfloat16.
    """
    dtype, (rows, groups, keys, _) = key_RGKE.dtype, key_RGKE.shape
    rest_RK = log_duration_RK.float().clamp(min=-1e3) / scale  # exp(-1e3) is 0: a duration of zero
    parts = []
    for _ in range(3):
        parts.append(rest_RK.to(dtype))
        rest_RK = rest_RK - parts[-1].float()
    channels_RGK3 = torch.stack(parts, dim=-1)[:, None].expand(rows, groups, keys, 3)
    key_RGKE = torch.cat([key_RGKE, F.pad(channels_RGK3, (0, 5))], dim=-1)
    return F.pad(F.pad(query_RHTE, (0, 3), value=1.0), (0, 5)), key_RGKE, F.pad(value_RGKE, (0, 8))
