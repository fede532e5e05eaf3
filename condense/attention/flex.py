"""torch's FlexAttention: compiled on CUDA. On CPUs it isn't compiled and doesn't have a backward pass.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

from functools import cache, lru_cache

import torch

from ..segmentation import on_device


def flex_attention(query_RHTE, key_RGKE, value_RGKE, mask, scale, dropout):
    assert not dropout
    on_cpu = query_RHTE.device.type == "cpu"
    from torch.nn.attention.flex_attention import create_block_mask

    num_queries, num_keys = query_RHTE.shape[2], key_RGKE.shape[2]
    device = query_RHTE.device
    if mask.lower_right and num_queries == 1:
        block_mask = None  # the last query sees all keys
    elif mask.lower_right:
        block_mask = _lower_right_block_mask(num_queries, num_keys, device)
    else:
        first_visible_key_R = on_device(mask.first_visible_key_R, device)
        first_query_key_R = on_device(mask.first_query_key_R, device)

        def visible(row, head, query, key):
            return (key >= first_visible_key_R[row]) & (key <= first_query_key_R[row] + query)

        block_mask = create_block_mask(visible, len(first_visible_key_R), None, num_queries, num_keys, device)
    weigh = None
    if (log_duration_RK := mask.log_duration_RK) is not None:

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
@torch.inference_mode(False)  # training may use the tensors of a call in inference mode
def _lower_right_block_mask(num_queries: int, num_keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    offset = num_keys - num_queries
    return create_block_mask(
        lambda row, head, query, key: key <= query + offset, None, None, num_queries, num_keys, device
    )
