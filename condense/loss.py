"""The loss of a call, block by block: cross-entropy of hidden states, for a bounded number of logits at a time.

Blocks are taken from the last layer's outputs after the layers have run, outside of gradient checkpointing. Nothing
computes logits a second time: the gradients of a block are computed with it (`loss_gradient`), and no logits outlive
their use. If autograd must be used, the backward pass computes logits again, unless the vocabulary is smaller than the
hidden size.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, D hidden size, S chunks, n
target tokens.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .configuration import IGNORE_INDEX
from .loss_gradient import head_gradients
from .ops.host_copy import HostCopy
from .ops.linear import apply_linear
from .ops.shared_weights import for_recomputation
from .ops.transforms import is_in_torch_func
from .segmentation import Chunk, UnpaddedBatch, on_device

MAX_LOGITS = 2**26  # at a time: 256 MiB in float32
BLOCK_TOKENS = 4096  # norm and loss wait for so many, and process them in parts of MAX_LOGITS

TokenLosses = Callable[[Callable, torch.Tensor, torch.Tensor], torch.Tensor]  # of a head, hidden states and targets


def max_tokens(vocab_size: int) -> int:
    """Returns the number of tokens that have logits at a time."""
    return max(1, MAX_LOGITS // vocab_size)


class Targets:
    """The next tokens that the tokens of a call predict.

    The host reads labels on a device when it first needs targets, after it has launched the layers: it would wait for
    all earlier work of the device, such as the backward pass of the step before.
    """

    def __init__(self, batch: UnpaddedBatch, labels_BN: torch.Tensor):
        self.batch, self._labels = batch, HostCopy(labels_BN)
        self.targets_on_device_BN: torch.Tensor | None = None  # copied once the device is known

    @cached_property
    def targets_BN(self) -> torch.Tensor:
        return self.batch.next_labels(self._labels.values().long(), IGNORE_INDEX)

    @cached_property
    def number(self) -> int:
        return self._before_column[-1]

    @cached_property
    def _before_column(self) -> list[int]:
        return [0, *(self.targets_BN != IGNORE_INDEX).sum(0).cumsum(0).tolist()]

    def of(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the chunk's hidden states [n, D] that have a target, and the targets [n]."""
        device = hidden_RTD.device
        if self.targets_on_device_BN is None:
            self.targets_on_device_BN = on_device(self.targets_BN, device)
        target_RT = self.batch.gather(self.targets_on_device_BN, chunk)
        if chunk.rectangular and self.number_in(chunk) == len(chunk.rows) * chunk.width:
            return hidden_RTD.flatten(0, 1), target_RT.flatten()
        row_n, token_n = chunk.token_indices
        counted = self.batch.gather(self.targets_BN, chunk)[row_n, token_n] != IGNORE_INDEX
        selected = on_device(row_n[counted], device), on_device(token_n[counted], device)
        return hidden_RTD[selected], target_RT[selected]

    def number_in(self, chunk: Chunk) -> int:
        if (columns := self.batch.shared_columns(chunk)) is not None:
            return self._before_column[columns.stop] - self._before_column[columns.start]
        row_n, token_n = chunk.token_indices
        return int((self.batch.gather(self.targets_BN, chunk)[row_n, token_n] != IGNORE_INDEX).sum())

    def mean(self, total: torch.Tensor, num_items: int | torch.Tensor | None) -> torch.Tensor:
        """Returns a sum over all targets, divided by their number or by `num_items`; 0 if there is no target."""
        return total / (max(self.number, 1) if num_items is None else num_items)


class LossAccumulator:
    """The loss of a call's chunks, which are added in order. `norm` is applied to them before the head."""

    def __init__(self, norm: nn.Module | None, head: Callable, vocab_size: int, targets: Targets):
        self.norm, self.head, self.vocab_size, self.targets = norm, head, vocab_size, targets
        self.max_tokens = max_tokens(vocab_size)
        self.gradients = head_gradients(head, norm) if torch.is_grad_enabled() else None
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waiting_tokens = 0
        self.block_losses: list[torch.Tensor] = []
        self.chunk_losses: list[torch.Tensor] = []  # detached

    def add(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> None:
        hidden_nD, target_n = self.targets.of(hidden_RTD, chunk)
        shares_memory = hidden_RTD._is_view() and hidden_nD._is_view()
        self.waiting.append((hidden_nD.clone() if shares_memory else hidden_nD, target_n))
        # Not the number of targets: under ZeRO-3 all ranks must take blocks at the same time.
        self.waiting_tokens += chunk.batch_size * chunk.width
        if self.waiting_tokens >= BLOCK_TOKENS:
            self.take_block()

    def take_block(self) -> None:
        """Computes the losses of the waiting chunks."""
        if not self.waiting:
            return
        sizes = [len(target_n) for _, target_n in self.waiting]
        tensors = zip(*self.waiting, strict=True)
        hidden_nD, target_n = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in tensors)
        self.waiting, self.waiting_tokens = [], 0
        if self.gradients is not None:
            block_loss, losses_n = self.gradients.block_loss(hidden_nD, target_n, self.max_tokens)
        else:
            normed_nD = hidden_nD if self.norm is None else self.norm(hidden_nD)
            recompute = self.vocab_size > normed_nD.shape[-1]  # else logits are not larger than the kept tensors
            losses_n = cross_entropies(self.head, normed_nD, target_n, self.max_tokens, recompute)
            block_loss, losses_n = losses_n.sum(), losses_n.detach()
        self.block_losses.append(block_loss)
        if len(set(sizes)) == 1:
            self.chunk_losses += losses_n.view(len(sizes), sizes[0]).sum(1).unbind()
        else:
            self.chunk_losses += [part.sum() for part in losses_n.split(sizes)]

    def loss(self, num_items: int | torch.Tensor | None) -> torch.Tensor:
        """Returns the mean over all targets, or the sum over `num_items`. Raises `ValueError` if there was no chunk."""
        assert not self.waiting
        check_not_empty(self.block_losses)
        losses = self.block_losses
        total = torch.stack(losses).sum() if self.gradients is None else self.gradients.total(losses)
        return self.targets.mean(total, num_items)


def check_not_empty(losses: list) -> None:
    if not losses:
        raise ValueError("the attention mask hides every token of the batch: there is no loss to compute.")


def cross_entropies(
    head: Callable, hidden_nD: torch.Tensor, target_n: torch.Tensor, max_tokens: int, recompute: bool = True
) -> torch.Tensor:
    """Returns -log p(target) [n] in float32 (float64 for float64 models), for `max_tokens` tokens at a time.

    With `recompute`, the backward pass computes logits again.
    """
    token_losses: TokenLosses = _token_losses
    if recompute:
        token_losses = with_recomputation(token_losses, head)
    parts = zip(hidden_nD.split(max_tokens), target_n.split(max_tokens), strict=True)
    return torch.cat([token_losses(head, *part) for part in parts])


def next_labels(labels_BN: torch.Tensor) -> torch.Tensor:
    """Returns the label [B, N] of the token after each one; the last has none."""
    return F.pad(labels_BN[:, 1:], (0, 1), value=IGNORE_INDEX)


def with_recomputation(token_losses: TokenLosses, head: Callable) -> TokenLosses:
    """Makes the backward pass recompute the logits of `token_losses`, with the weights of the forward pass.

    torch.func does not support checkpoints: within it, logits are kept.
    """
    if is_in_torch_func():
        return token_losses
    module = head if isinstance(head, nn.Module) else None
    weights: dict[str, torch.Tensor] = {} if module is None else dict(module.named_parameters())

    def with_weights(hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
        if module is None or all(one is weights[name] for name, one in module.named_parameters()):
            return token_losses(head, hidden_nD, target_n)
        return token_losses(partial(functional_call, module, weights), hidden_nD, target_n)

    def checkpointed(_, hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
        watched = [weight for weight in weights.values() if not hasattr(weight, "ds_id")]
        watched_nD = _WithWeights.apply(hidden_nD, *watched)  # ZeRO-3 empties its weights between their uses
        return checkpoint(for_recomputation(with_weights), watched_nD, target_n, use_reentrant=False)

    return checkpointed


class _WithWeights(torch.autograd.Function):
    """Returns the hidden states. Autograd then refuses a backward pass if the weights have changed."""

    @staticmethod
    def forward(ctx, hidden_nD: torch.Tensor, *weights: torch.Tensor):
        ctx.save_for_backward(*weights)
        return hidden_nD.view_as(hidden_nD)

    @staticmethod
    def backward(ctx, gradient_nD):
        return gradient_nD, *[None] * len(ctx.saved_tensors)


def _token_losses(head, hidden_nD, target_n):
    dtype, logits_nV = torch.promote_types(hidden_nD.dtype, torch.float32), apply_linear(head, hidden_nD)
    return F.cross_entropy(logits_nV.to(dtype), target_n.to(logits_nV.device), reduction="none")
