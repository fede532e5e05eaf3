"""Attention of a step's queries over [memory ; current segment]: which implementation computes it.

All compute softmax(q.k * scale + log d) v with the lower-right-aligned causal mask: the last query sees all keys, each
earlier query one key less. Where rows stand at different places of their segments, a `Visibility` says per row which
keys of a whole buffer may be seen.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head width.
"""

import torch
from transformers.utils import is_flash_attn_2_available

from .blocked import blocked_attention
from .eager import eager_attention
from .flash import flash_attention
from .flex import flex_attention
from .mask import Visibility
from .sdpa import sdpa_attention

IMPLEMENTATIONS = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "flex_attention": flex_attention,
    "flash_attention_2": flash_attention,
    "blocked": blocked_attention,
}

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
