"""The cross-entropy of logits and its gradient, in one reading of the logits and one that writes over them.

Axes: n target tokens, V vocabulary.
"""

import torch

from ..weight_sum import sum_dtype
from .availability import uses_kernels
from .layout import with_unit_stride

COPIED_LOGITS = 2**24  # in float32 at a time, without a kernel


def cross_entropy_and_gradient(
    logits_nV: torch.Tensor, target_n: torch.Tensor, needs_gradient: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns -log p(target) [n] in float32 (float64 for float64 logits), and the gradient [n, V] of their sum, p(v) -
    [v = target], stored in place of the logits: nothing else of their size is kept."""
    if not uses_kernels(logits_nV) or with_unit_stride(logits_nV) is not logits_nV:
        return plain_cross_entropy_and_gradient(logits_nV, target_n, needs_gradient)
    from .triton_cross_entropy import cross_entropy

    losses_n = cross_entropy(logits_nV, target_n.contiguous(), needs_gradient)
    return losses_n, logits_nV if needs_gradient else None


def plain_cross_entropy_and_gradient(
    logits_nV: torch.Tensor, target_n: torch.Tensor, needs_gradient: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Makes nothing else of the logits' size: below float32, a few rows at a time are copied."""
    if logits_nV.dtype == sum_dtype(logits_nV.dtype):
        return _in_place(logits_nV, target_n, needs_gradient)
    rows = max(1, COPIED_LOGITS // logits_nV.shape[1])
    parts = zip(logits_nV.split(rows), target_n.split(rows), strict=True)
    losses = [_in_place(*part, needs_gradient)[0] for part in parts]
    return torch.cat(losses), logits_nV if needs_gradient else None


def _in_place(
    logits_nV: torch.Tensor, target_n: torch.Tensor, needs_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    target_n1 = target_n[:, None]
    exp_nV = logits_nV.to(sum_dtype(logits_nV.dtype))  # the logits themselves in float32
    exp_nV.sub_(exp_nV.amax(-1, keepdim=True))
    of_target_n1 = exp_nV.gather(1, target_n1)
    sum_n1 = exp_nV.exp_().sum(-1, keepdim=True)
    losses_n = (sum_n1.log() - of_target_n1).squeeze(1)
    if not needs_gradient:
        return losses_n, None
    exp_nV.div_(sum_n1).scatter_add_(1, target_n1, sum_n1.new_full((), -1).expand_as(sum_n1))
    return losses_n, exp_nV if exp_nV is logits_nV else logits_nV.copy_(exp_nV)
