"""Cross-entropy of a step's hidden states, a bounded number of logits at a time.

Logits are recomputed in the backward pass, so that none of them outlives its chunk, unless they are
narrower than the hidden states that they come from. torch's fused `linear_cross_entropy` is not used:
without chunks it takes bfloat16 losses from bfloat16 logits, and with them every call, here every
segment, keeps a gradient of the whole head until the backward pass.

Axes: n target tokens, D model width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 2**26  # per chunk: 256 MiB in float32


def cross_entropy_sum(
    head: Callable, hidden_nD: torch.Tensor, target_n: torch.Tensor, vocab_size: int, recompute: bool
) -> torch.Tensor:
    """The sum of -log p(target) in float32 (float64 for float64 models).

    `recompute` is false where the caller recomputes the whole step anyway.
    """
    total = hidden_nD.new_zeros((), dtype=torch.promote_types(hidden_nD.dtype, torch.float32))
    chunk = max(1, MAX_LOGITS // vocab_size)
    recompute = recompute and vocab_size > hidden_nD.shape[-1]
    for hidden, target in zip(hidden_nD.split(chunk), target_n.split(chunk), strict=True):
        arguments = head, hidden, target, total.dtype
        total = total + (
            checkpoint(_chunk_loss, *arguments, use_reentrant=False) if recompute else _chunk_loss(*arguments)
        )
    return total


def _chunk_loss(head, hidden_nD, target_n, dtype):
    return F.cross_entropy(head(hidden_nD).to(dtype), target_n, reduction="sum")
