"""The loss of a call, chunk by chunk: cross-entropy of hidden states, for a bounded number of logits at a time.

No block of logits outlives its use. Its gradients are computed at once (`loss_gradient`), or else the backward pass
computes the logits again, unless the vocabulary is smaller than the hidden size. torch's fused `linear_cross_entropy`
could take this place: with blocks and reduction="none" it stores no logits either. It is slower on CPUs;
`scripts/gpu_bench --only loss` compares them, with `--smoke` on a CPU.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, D hidden size, n target tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .configuration import IGNORE_INDEX
from .loss_gradient import BlockLoss, HeadGradients, head_gradients
from .segmentation import Chunk, UnpaddedBatch, on_device
from .shared_weights import for_recomputation

MAX_LOGITS = 2**26  # per block: 256 MiB in float32


class LossAccumulator:
    """The summed cross-entropy of each chunk, and the loss of the whole batch.

    `recompute` is false where the caller computes the whole chunk of text again in the backward pass. `at_once` permits
    to compute gradients in the forward pass: each chunk is computed once, and its loss serves `batch_loss` alone.
    """

    def __init__(
        self,
        head: Callable,
        vocab_size: int,
        batch: UnpaddedBatch,
        labels_BN: torch.Tensor,
        recompute: bool,
        at_once: bool = False,
    ):
        self.head, self.vocab_size, self.batch, self.recompute = head, vocab_size, batch, recompute
        self.gradients = head_gradients(head) if at_once and torch.is_grad_enabled() else None
        self.targets_BN = batch.next_labels(labels_BN.cpu().long(), IGNORE_INDEX)
        self.targets_on_device_BN: torch.Tensor | None = None  # copied once the device is known
        self.num_targets = int((self.targets_BN != IGNORE_INDEX).sum())

    def chunk_loss(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The sum over the chunk's targets; the head sees only hidden states that have a target."""
        device = hidden_RTD.device
        if self.targets_on_device_BN is None:
            self.targets_on_device_BN = on_device(self.targets_BN, device)
        target_RT = self.batch.gather(self.targets_on_device_BN, chunk)
        row_n, token_n = chunk.token_indices
        counted = self.batch.gather(self.targets_BN, chunk)[row_n, token_n] != IGNORE_INDEX
        if bool(counted.all()) and chunk.rectangular:
            hidden_nD, target_n = hidden_RTD.flatten(0, 1), target_RT.flatten()
        else:
            selected = on_device(row_n[counted], device), on_device(token_n[counted], device)
            hidden_nD, target_n = hidden_RTD[selected], target_RT[selected]
        if self.gradients is not None:
            return cross_entropy_at_once(self.gradients, hidden_nD, target_n, self.vocab_size)
        return cross_entropy_sum(self.head, hidden_nD, target_n, self.vocab_size, self.recompute)

    def num_targets_of(self, chunk: Chunk) -> int:
        row_n, token_n = chunk.token_indices
        return int((self.batch.gather(self.targets_BN, chunk)[row_n, token_n] != IGNORE_INDEX).sum())

    def batch_loss(self, chunk_losses: Sequence[torch.Tensor], num_items: int | torch.Tensor | None) -> torch.Tensor:
        """The mean over all targets, or the sum over `num_items`; 0 where there is no target."""
        if not chunk_losses:
            raise ValueError("the attention mask hides every token of the batch: there is no loss to compute.")
        total = torch.stack(list(chunk_losses)).sum() if self.gradients is None else self.gradients.total(chunk_losses)
        return total / (max(self.num_targets, 1) if num_items is None else num_items)


def cross_entropy_sum(
    head: Callable, hidden_nD: torch.Tensor, target_n: torch.Tensor, vocab_size: int, recompute: bool
) -> torch.Tensor:
    """The sum of -log p(target) in float32 (float64 for float64 models).

    `recompute` is false where the caller recomputes the whole chunk of text in the backward pass.
    """
    total = hidden_nD.new_zeros((), dtype=_dtype(hidden_nD))
    recompute = recompute and vocab_size > hidden_nD.shape[-1]
    block_loss: BlockLoss = partial(_block_loss, dtype=total.dtype)
    if recompute:
        block_loss = recomputed(block_loss, head)
    for hidden, target in _blocks(hidden_nD, target_n, vocab_size):
        total = total + block_loss(head, hidden, target)
    return total


def recomputed(block_loss: BlockLoss, head: Callable) -> BlockLoss:
    """The loss of a block, whose logits the backward pass computes again, with the weights of the forward pass.

    torch.func does not support checkpoints: within it, logits are kept.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return block_loss
    module = head if isinstance(head, nn.Module) else None
    weights: dict[str, torch.Tensor] = {} if module is None else dict(module.named_parameters())

    def with_weights(hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
        if module is None or all(one is weights[name] for name, one in module.named_parameters()):
            return block_loss(head, hidden_nD, target_n)
        return block_loss(partial(functional_call, module, weights), hidden_nD, target_n)

    def checkpointed(_, hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
        watched_nD = _WithWeights.apply(hidden_nD, *weights.values())
        return checkpoint(for_recomputation(with_weights), watched_nD, target_n, use_reentrant=False)

    return checkpointed


class _WithWeights(torch.autograd.Function):
    """The hidden states. Autograd then refuses a backward pass after the weights have changed."""

    @staticmethod
    def forward(ctx, hidden_nD: torch.Tensor, *weights: torch.Tensor):
        ctx.save_for_backward(*weights)
        return hidden_nD.view_as(hidden_nD)

    @staticmethod
    def backward(ctx, gradient_nD):
        return gradient_nD, *[None] * len(ctx.saved_tensors)


def cross_entropy_at_once(
    gradients: HeadGradients, hidden_nD: torch.Tensor, target_n: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """As `cross_entropy_sum`, of a chunk whose loss goes to `gradients.total`."""
    block_loss = partial(_block_loss, dtype=_dtype(hidden_nD))
    return gradients.chunk_loss(_blocks(hidden_nD, target_n, vocab_size), block_loss)


def _dtype(hidden_nD: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden_nD.dtype, torch.float32)


def _blocks(
    hidden_nD: torch.Tensor, target_n: torch.Tensor, vocab_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = max(1, MAX_LOGITS // vocab_size)
    return list(zip(hidden_nD.split(size), target_n.split(size), strict=True))


def _block_loss(head, hidden_nD, target_n, dtype):
    return F.cross_entropy(head(hidden_nD).to(dtype), target_n, reduction="sum")
