"""Attention of a chunk's queries over [memory ; current segment]: the choice of an implementation.

Every implementation computes softmax(q.k * scale + log d) v with the lower-right causal mask: the last query sees all
keys, each earlier query one key fewer. When rows are at different offsets of their segments, the `AttentionMask` holds
the keys of the whole buffer that each row sees.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

import torch

from ..configuration import WITHOUT_DROPOUT
from ..ops.transforms import is_in_torch_func
from .blocked import blocked_attention
from .eager import eager_attention
from .flash import flash_attention
from .flex import flex_attention
from .mask import AttentionMask
from .sdpa import sdpa_attention
from .varlen import varlen_attention

IMPLEMENTATIONS = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "flex_attention": flex_attention,
    "flash_attention_2": flash_attention,
    "blocked": blocked_attention,
    "varlen": varlen_attention,
}

# Measured on two CPU cores (docs/results/attention): blocks do not pay below this number of multiplications of a row
# with its keys, nor above this number of bytes of one key head's scores.
BLOCKED_PRODUCTS = 2**17
BLOCKED_MATRIX = 16 * 2**20
CPU_MULTIPLIES_BFLOAT16 = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))


def choose_attention(query_RHTE, key_RGKE, dropout: float) -> str:
    """Returns the implementation that "auto" stands for: sdpa, except where blocks were measured to be faster.

    The number of rows does not matter: a row gets the same implementation in a batch as on its own.
    """
    is_fast = query_RHTE.device.type == "cpu" and query_RHTE.dtype == torch.bfloat16 and CPU_MULTIPLIES_BFLOAT16
    if not is_fast or dropout or is_in_torch_func():
        return "sdpa"
    _, num_heads, num_queries, head_width = query_RHTE.shape
    num_key_heads, num_keys = key_RGKE.shape[1:3]
    scores = num_heads * num_queries * num_keys
    fits = scores // num_key_heads * query_RHTE.itemsize <= BLOCKED_MATRIX
    return "blocked" if fits and scores * head_width >= BLOCKED_PRODUCTS else "sdpa"


def attend(implementation: str, query_RHTE, key_RGKE, value_RGKE, mask: AttentionMask, scale: float, dropout: float):
    """Returns the attention output [R, T, H * E] of the named implementation."""
    if implementation == "auto":
        implementation = choose_attention(query_RHTE, key_RGKE, dropout)
    if dropout and implementation in WITHOUT_DROPOUT:
        raise ValueError(
            f"{implementation} attention has no dropout: set attention_dropout={dropout} to 0, or use sdpa."
        )
    output_RHTE = IMPLEMENTATIONS[implementation](query_RHTE, key_RGKE, value_RGKE, mask, scale, dropout)
    return output_RHTE.transpose(1, 2).flatten(2)
