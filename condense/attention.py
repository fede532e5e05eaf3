"""Attention of a step's queries over [memory ; current segment], in several implementations.

All compute softmax(q.k * scale + log d) v with the lower-right-aligned causal mask: the last query sees
all keys, each earlier query one key less. Where rows stand at different places of their segments, a
`Visibility` says per row which keys of a whole buffer may be seen.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head width.
"""

import importlib
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers.utils import is_flash_attn_2_available

from .blocked_attention import blocked_attention
from .segmentation import Piece, on_device


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


# Measured on two CPU cores (docs/results/attention): a row's multiplications with keys below which preparing blocks
# takes longer than they gain, and the bytes of a key head's scores beyond which they gain no more.
BLOCKED_PRODUCTS = 2**17
BLOCKED_MATRIX = 16 * 2**20
CPU_MULTIPLIES_BFLOAT16 = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))


def choose_attention(query_RHTE, key_RGKE, visibility: Visibility, dropout: float) -> str:
    """What "auto" takes. Measured on CPUs (docs/results/attention); on CUDA it follows from what needs a mask.

    Without one sdpa takes its own flash kernel; a mask or a bias costs it that, and flash-attn's package, where it is
    installed, needs none. How many rows there are does not matter: a row is treated in a batch as it is alone.
    """
    if query_RHTE.is_cuda:
        half = query_RHTE.dtype in (torch.bfloat16, torch.float16)
        masked = query_RHTE.shape[2] > 1 and not (visibility.lower_right and visibility.log_duration_RK is None)
        return "flash_attention_2" if masked and half and is_flash_attn_2_available() else "sdpa"
    if query_RHTE.device.type != "cpu" or query_RHTE.dtype != torch.bfloat16 or dropout or not CPU_MULTIPLIES_BFLOAT16:
        return "sdpa"
    _, num_heads, num_queries, head_width = query_RHTE.shape
    num_key_heads, num_keys = key_RGKE.shape[1:3]
    scores = num_heads * num_queries * num_keys
    fits = scores // num_key_heads * query_RHTE.itemsize <= BLOCKED_MATRIX
    return "blocked" if fits and scores * head_width >= BLOCKED_PRODUCTS else "sdpa"


def attend(implementation: str, query_RHTE, key_RGKE, value_RGKE, visibility: Visibility, scale: float, dropout: float):
    """Attention output [R, T, H * E] of the named implementation."""
    if implementation == "auto":
        implementation = choose_attention(query_RHTE, key_RGKE, visibility, dropout)
    output_RHTE = IMPLEMENTATIONS[implementation](query_RHTE, key_RGKE, value_RGKE, visibility, scale, dropout)
    return output_RHTE.transpose(1, 2).flatten(2)


def eager_attention(query_RHTE, key_RGKE, value_RGKE, visibility, scale, dropout):
    groups = query_RHTE.shape[1] // key_RGKE.shape[1]
    key_RHKE, value_RHKE = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_RGKE, value_RGKE))
    score_RHTK = query_RHTE @ key_RHKE.transpose(2, 3) * scale
    accurate = torch.promote_types(score_RHTK.dtype, torch.float32)
    score_RHTK = score_RHTK.to(accurate)
    score_RHTK = score_RHTK + visibility.bias(score_RHTK.shape[2], score_RHTK.shape[3], score_RHTK)
    weight_RHTK = score_RHTK.softmax(-1).to(query_RHTE.dtype)
    return F.dropout(weight_RHTK, dropout) @ value_RHKE


def sdpa_attention(query_RHTE, key_RGKE, value_RGKE, visibility, scale, dropout):
    num_queries, num_keys = query_RHTE.shape[2], key_RGKE.shape[2]
    mask, is_causal = None, False
    if not visibility.lower_right or visibility.log_duration_RK is not None:
        if visibility.log_duration_RK is None:
            mask = visibility.mask(num_queries, num_keys, query_RHTE.device)
        else:
            mask = visibility.bias(num_queries, num_keys, query_RHTE)
    elif num_queries == num_keys:
        is_causal = True  # upper left and lower right are the same here
    elif num_queries > 1:
        if query_RHTE.is_cuda:  # reaches the flash kernel without a mask
            mask = causal_lower_right(num_queries, num_keys)
        else:
            mask = visibility.mask(num_queries, num_keys, query_RHTE.device)
    return F.scaled_dot_product_attention(
        query_RHTE,
        key_RGKE,
        value_RGKE,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query_RHTE.shape[1] != key_RGKE.shape[1],
    )


def flex_attention(query_RHTE, key_RGKE, value_RGKE, visibility, scale, dropout):
    if dropout:
        raise ValueError(f"flex_attention has no dropout: set attention_dropout={dropout} to 0 or use sdpa.")
    on_cpu = query_RHTE.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and query_RHTE.requires_grad:
        raise ValueError("flex_attention has no backward on CPU: train with attn_implementation='sdpa'.")
    from torch.nn.attention.flex_attention import create_block_mask

    num_queries, num_keys = query_RHTE.shape[2], key_RGKE.shape[2]
    device = query_RHTE.device
    if visibility.lower_right and num_queries == 1:
        block_mask = None  # the last query sees all keys
    elif visibility.lower_right:
        block_mask = _lower_right_block_mask(num_queries, num_keys, device)
    else:
        first_key_R, own_key_R = (on_device(keys, device) for keys in (visibility.first_key_R, visibility.own_key_R))

        def visible(row, head, query, key):
            return (key >= first_key_R[row]) & (key <= own_key_R[row] + query)

        block_mask = create_block_mask(visible, len(first_key_R), None, num_queries, num_keys, device)
    weigh = None
    if (log_duration_RK := visibility.log_duration_RK) is not None:

        def weigh(score, row, head, query, key):
            return score + log_duration_RK[row, key]

    return _flex_kernel(compiled=not on_cpu)(
        query_RHTE,
        key_RGKE,
        value_RGKE,
        score_mod=weigh,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query_RHTE.shape[1] != key_RGKE.shape[1],
    )


@cache
def _flex_kernel(compiled: bool):
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention) if compiled else flex_attention.flex_attention


@lru_cache(maxsize=16)
def _lower_right_block_mask(num_queries: int, num_keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    offset = num_keys - num_queries
    return create_block_mask(
        lambda row, head, query, key: key <= query + offset, None, None, num_queries, num_keys, device
    )


def flash_attention(query_RHTE, key_RGKE, value_RGKE, visibility, scale, dropout):
    """flash-attn's kernels, whose causal mask is lower-right aligned.

    Durations go in as further channels of queries and keys; rows at different places of their segments
    are packed, each with the keys that it may see.
    """
    head_width = value_RGKE.shape[-1]
    if visibility.log_duration_RK is not None:
        query_RHTE, key_RGKE, value_RGKE = _durations_as_channels(
            query_RHTE, key_RGKE, value_RGKE, visibility.log_duration_RK, scale
        )
    query_RTHE, key_RKGE, value_RKGE = (tensor.transpose(1, 2) for tensor in (query_RHTE, key_RGKE, value_RGKE))
    kernels = flash_attention_kernels()
    if visibility.lower_right:
        output_RTHE = kernels.flash_attn_func(
            query_RTHE, key_RKGE, value_RKGE, dropout_p=dropout, softmax_scale=scale, causal=True
        )
        return output_RTHE.transpose(1, 2)[..., :head_width]

    piece, device = visibility.piece, query_RHTE.device
    row_q, token_q = (on_device(index, device) for index in piece.valid)
    key_counts = [
        memory + filled + count
        for memory, filled, count in zip(piece.memory_lengths, piece.filled, piece.counts, strict=True)
    ]
    offsets_K = torch.arange(max(key_counts))
    row_k, offset_k = (offsets_K < torch.tensor(key_counts)[:, None]).nonzero(as_tuple=True)
    key_k = on_device(visibility.first_key_R[row_k] + offset_k, device)
    row_k = on_device(row_k, device)
    packed_qHE = kernels.flash_attn_varlen_func(
        query_RTHE[row_q, token_q],
        key_RKGE[row_k, key_k],
        value_RKGE[row_k, key_k],
        cu_seqlens_q=_boundaries(piece.counts, device),
        cu_seqlens_k=_boundaries(key_counts, device),
        max_seqlen_q=max(piece.counts),
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


IMPLEMENTATIONS = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "flex_attention": flex_attention,
    "flash_attention_2": flash_attention,
    "blocked": blocked_attention,
}
