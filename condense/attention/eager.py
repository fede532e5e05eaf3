"""Attention step by step: the scores of all heads, in float32, as one matrix.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

import torch
import torch.nn.functional as F


def eager_attention(query_RHTE, key_RGKE, value_RGKE, mask, scale, dropout):
    groups = query_RHTE.shape[1] // key_RGKE.shape[1]
    key_RHKE, value_RHKE = key_RGKE, value_RGKE
    if groups > 1:
        key_RHKE, value_RHKE = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_RGKE, value_RGKE))
    score_RHTK = query_RHTE @ key_RHKE.transpose(2, 3) * scale
    accurate = torch.promote_types(score_RHTK.dtype, torch.float32)
    score_RHTK = score_RHTK.to(accurate)
    score_RHTK = score_RHTK + mask.additive(score_RHTK.shape[2], score_RHTK.shape[3], score_RHTK)
    weight_RHTK = score_RHTK.softmax(-1).to(query_RHTE.dtype)
    return F.dropout(weight_RHTK, dropout) @ value_RHKE
