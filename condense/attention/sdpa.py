"""torch's scaled_dot_product_attention, which contains a flash kernel on CUDA.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from .mask import AttentionMask


def sdpa_attention(query_RHTE, key_RGKE, value_RGKE, mask: AttentionMask, scale: float, dropout: float):
    bias, is_causal = _bias(query_RHTE, key_RGKE.shape[2], mask)
    varies = query_RHTE.is_cuda and bias is None and not (mask.chunk.whole_segments or torch.compiler.is_compiling())
    with without_cudnn() if varies else nullcontext():
        return F.scaled_dot_product_attention(
            query_RHTE,
            key_RGKE,
            value_RGKE,
            attn_mask=bias,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query_RHTE.shape[1] != key_RGKE.shape[1],
        )


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Avoids cuDNN for shapes that do not recur, such as new tokens, each with one key more. cuDNN's kernel prepares
    itself for every new shape, which takes longer than the attention itself (docs/performance.md)."""
    cuda = torch.backends.cuda
    has_others = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    if not (cuda.cudnn_sdp_enabled() and has_others):  # another thread may have disabled it, and enables it again
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)


def _bias(query_RHTE: torch.Tensor, num_keys: int, mask: AttentionMask) -> tuple[torch.Tensor | None, bool]:
    """Returns `attn_mask` and `is_causal`; the flash kernel runs if no mask is materialised."""
    num_queries = query_RHTE.shape[2]
    if mask.log_duration_RK is not None:
        return mask.additive(num_queries, num_keys, query_RHTE), False
    if not mask.lower_right:
        return _visible_keys(query_RHTE, num_keys, mask), False
    if num_queries == num_keys:
        return None, True  # upper left and lower right are the same here
    if num_queries == 1:
        return None, False  # the last query sees all keys
    if query_RHTE.is_cuda and not torch.compiler.is_exporting():  # an exported program can't make this bias
        return causal_lower_right(num_queries, num_keys), False
    return _visible_keys(query_RHTE, num_keys, mask), False


def _visible_keys(query_RHTE: torch.Tensor, num_keys: int, mask: AttentionMask) -> torch.Tensor:
    """Returns a bias on a CPU, unless no mask is kept: a kernel would build it from a boolean mask in each layer."""
    if query_RHTE.device.type == "cpu" and mask.shared is not None:
        return mask.additive(query_RHTE.shape[2], num_keys, query_RHTE)
    return mask.boolean(query_RHTE.shape[2], num_keys, query_RHTE.device)
