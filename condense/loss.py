"""Cross-entropy of hidden states, for a bounded number of logits at a time.

The backward pass computes the logits of a block of tokens again, so that no block outlives its use, unless the
vocabulary is smaller than the hidden size. torch's fused `linear_cross_entropy` is not used: without blocks it
computes bfloat16 losses from bfloat16 logits, and with blocks every call (here every segment) keeps a gradient of
the whole head until the backward pass.

Axes: n target tokens, D hidden size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**26  # per block: 256 MiB in float32


def cross_entropy_sum(
    head: Callable, hidden_nD: torch.Tensor, target_n: torch.Tensor, vocab_size: int, recompute: bool
) -> torch.Tensor:
    """The sum of -log p(target) in float32 (float64 for float64 models).

    `recompute` is false where the caller recomputes the whole chunk of text in the backward pass.
    """
    total = hidden_nD.new_zeros((), dtype=torch.promote_types(hidden_nD.dtype, torch.float32))
    block_size = max(1, MAX_LOGITS // vocab_size)
    recompute = recompute and vocab_size > hidden_nD.shape[-1]
    for hidden, target in zip(hidden_nD.split(block_size), target_n.split(block_size), strict=True):
        arguments = head, hidden, target, total.dtype
        total = total + (
            checkpoint(_block_loss, *arguments, use_reentrant=False) if recompute else _block_loss(*arguments)
        )
    return total


def _block_loss(head, hidden_nD, target_n, dtype):
    return F.cross_entropy(head(hidden_nD).to(dtype), target_n, reduction="sum")
