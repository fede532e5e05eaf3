"""Rows one after another without padding, each with the keys that it sees: as kernels for any row length need them.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension; q and k number the queries and the
keys of all rows.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..segmentation import Chunk, on_device
from .mask import AttentionMask


class PackedRows(NamedTuple):
    """The places of queries and keys in [R, T] and [R, K], and the borders between rows, as int32."""

    row_q: torch.Tensor
    token_q: torch.Tensor
    row_k: torch.Tensor
    key_k: torch.Tensor
    borders_q: torch.Tensor
    borders_k: torch.Tensor
    most_queries: int
    most_keys: int


def packed_rows(mask: AttentionMask, device: torch.device) -> PackedRows:
    """Packs a chunk whose rows are at different offsets of their segments; made once for all layers."""
    return mask.once(("packed", device), partial(_pack, mask, device))


def _pack(mask: AttentionMask, device: torch.device) -> PackedRows:
    chunk: Chunk = mask.chunk
    row_q, token_q = (on_device(index, device) for index in chunk.token_indices)
    key_counts = [
        memory + offset + count
        for memory, offset, count in zip(chunk.memory_lengths, chunk.offsets, chunk.counts, strict=True)
    ]
    offsets_K = torch.arange(max(key_counts))
    row_k, offset_k = (offsets_K < torch.tensor(key_counts)[:, None]).nonzero(as_tuple=True)
    key_k = on_device(mask.first_visible_key_R[row_k] + offset_k, device)
    borders_q, borders_k = (borders_of(counts, device) for counts in (chunk.counts, key_counts))
    return PackedRows(
        row_q, token_q, on_device(row_k, device), key_k, borders_q, borders_k, max(chunk.counts), max(key_counts)
    )  # fmt: skip


def borders_of(counts: list[int], device: torch.device) -> torch.Tensor:
    return on_device(F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int(), device)


def durations_as_channels(query_RHTE, key_RGKE, value_RGKE, log_duration_RK, scale):
    """Adds log d to every score through 8 extra channels (the kernels need multiples of 8).

    The bias is split over three of them to keep float32's precision in bfloat16.
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
