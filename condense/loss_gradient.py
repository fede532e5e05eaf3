"""The loss of a chunk together with its gradients, while the chunk's logits exist: they are computed once.

A loss that is a sum of chunks gives each chunk's gradient the same factor in the backward pass. So the gradients can be
computed with the factor 1 in the forward pass, block by block, where no block of logits outlives its use: a chunk keeps
the gradient of its hidden states, and all chunks share the sum of the weights' gradients.

Axes: D hidden size, n target tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from .execution.stacking import has_hooks
from .linear import Linear, linear
from .shared_weights import sum_dtype
from .transforms import is_transformed

BlockLoss = Callable[[Callable, torch.Tensor, torch.Tensor], torch.Tensor]  # of a head, hidden states and targets


class HeadGradients:
    """The gradients of a head's weights, summed in float32 over the chunks of one call.

    `chunk_loss` is called for every chunk, and `total` once, with all of their losses: another use of a chunk's loss
    has wrong gradients. There are no second derivatives: a backward pass with `create_graph=True` is refused.
    """

    def __init__(self, head: nn.Module):
        self.weights = [weight for weight in head.parameters() if weight.requires_grad]
        self.leaves = {
            name: weight.detach().requires_grad_(weight.requires_grad) for name, weight in head.named_parameters()
        }
        self.sums: list[torch.Tensor] = []

    def chunk_loss(self, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]], block_loss: BlockLoss) -> torch.Tensor:
        """The sum over blocks of hidden states [n, D] and targets [n]."""
        hidden, targets = zip(*blocks, strict=True)
        return _ChunkLoss.apply(self, block_loss, targets, *hidden)

    def total(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        return _Total.apply(self, len(losses), *losses, *self.weights)

    def block(
        self, block_loss: BlockLoss, hidden_nD: torch.Tensor, target_n: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss and the gradient of the hidden states [n, D]; adds the weights' gradients to the sums."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
            leaf_nD = hidden_nD.detach().requires_grad_(hidden_nD.requires_grad)
            # Not by the head itself: a hook on all modules would meet an inner pass.
            loss = block_loss(partial(_linear, self.leaves), leaf_nD, target_n)
            wanted = [tensor for tensor in (*self.leaves.values(), leaf_nD) if tensor.requires_grad]
            gradients = list(torch.autograd.grad(loss, wanted)) if wanted else []
        of_hidden_nD = gradients.pop() if leaf_nD.requires_grad else None
        if self.sums:
            self.sums = [total.to(sum_dtype(total.dtype)) for total in self.sums]
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.add_(gradient)
        else:
            self.sums = gradients
        return loss.detach(), of_hidden_nD


def head_gradients(head: Callable) -> HeadGradients | None:
    """None for a head whose gradients autograd must compute itself: one that is no plain linear map or has hooks of its
    own, in float16, whose loss is scaled before numbers are rounded, under autocast, which would keep a cast weight for
    each call, under torch.compile and within torch.func."""
    if is_transformed() or not isinstance(head, nn.Linear) or type(head) not in (nn.Linear, Linear):
        return None
    if "forward" in head.__dict__ or has_hooks(head):
        return None
    weights = head._parameters  # replicas and sharded or parametrized modules have none of these names
    is_plain = type(weights.get("weight")) is nn.Parameter and type(weights.get("bias")) in (nn.Parameter, type(None))
    if not is_plain or head.weight.dtype == torch.float16:
        return None
    device = head.weight.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return None if casts else HeadGradients(head)


class _ChunkLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients: HeadGradients, block_loss: BlockLoss, targets, *hidden):
        found = [gradients.block(block_loss, *block) for block in zip(hidden, targets, strict=True)]
        ctx.save_for_backward(*(gradient for _, gradient in found))
        return torch.stack([loss for loss, _ in found]).sum()

    @staticmethod
    def backward(ctx, factor):
        _check_first_derivative()
        return (
            None,
            None,
            None,
            *(None if one is None else _scaled(one, factor, one.dtype) for one in ctx.saved_tensors),
        )


class _Total(torch.autograd.Function):
    """Saves the sums where they are complete, so that hooks that move what is saved to the host see their values."""

    @staticmethod
    def forward(ctx, gradients: HeadGradients, num_losses: int, *tensors):
        ctx.num_losses, ctx.dtypes = num_losses, [weight.dtype for weight in gradients.weights]
        ctx.save_for_backward(*gradients.sums)
        gradients.sums = []
        return torch.stack(tensors[:num_losses]).sum()

    @staticmethod
    def backward(ctx, factor):
        _check_first_derivative()
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *[factor] * ctx.num_losses, *(_scaled(one, factor, dtype) for one, dtype in pairs)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product, rounded once: CUDA rounds a number without a dimension to the dtype of the tensor that it
    multiplies, and one with a dimension not."""
    if gradient.is_cuda or gradient.dtype != dtype:
        return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))
    return gradient * factor


def _linear(weights: Mapping[str, torch.Tensor], hidden_nD: torch.Tensor) -> torch.Tensor:
    return linear(hidden_nD, weights["weight"], weights.get("bias"))


def _check_first_derivative() -> None:
    """Autograd would take the gradients, which were computed before, for constants."""
    if torch.is_grad_enabled():
        raise ValueError(
            "create_graph=True: the gradients of a loss from labels are computed with it, and have no derivatives. "
            "Compute the loss from the logits of a call without labels."
        )


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
