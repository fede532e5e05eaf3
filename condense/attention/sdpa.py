"""torch's scaled_dot_product_attention, which holds a flash kernel on CUDA.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head width.
"""

import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


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
