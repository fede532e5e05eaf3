"""The loss of a block of tokens together with its gradients, while its logits exist: they are computed once.

A loss that is a sum of blocks gives each block's gradient the same factor in the backward pass. So the gradients can be
computed with the factor 1 in the forward pass: a block keeps the gradient of its hidden states, and all blocks share
the sum of the weights' gradients.

Axes: D hidden size, V vocabulary, n target tokens.
"""

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import nn

from .layers import RMSNorm
from .ops.kernels.cross_entropy import cross_entropy_and_gradient
from .ops.kernels.rms_norm import rms_norm
from .ops.linear import linear
from .ops.shared_weights import Begun, active_weights, may_be_summed
from .ops.transforms import autocast_dtype, has_hooks, is_transformed
from .ops.weight_sum import WeightSum

# Each part reads and writes the head's gradient sum, and has nothing else of the logits' size.
GPU_BYTES = 16  # of logits, for each of MAX_LOGITS: 1 GiB


class HeadGradients:
    """The gradients of the weights of a head, and of a norm before it, summed in float32 over the blocks of one call.

    `block_loss` is called for each block, and `total` once, with all of their losses: another use of a block's loss has
    wrong gradients. There are no second derivatives: a backward pass with `create_graph=True` is refused.
    """

    def __init__(self, head: nn.Linear, norm: RMSNorm | None = None):
        self.norm, self.head_weights = norm, [weight for weight in (head.weight, head.bias) if weight is not None]
        norm_weights = [] if norm is None else [norm.weight]
        self.weights = [one for one in (*self.head_weights, *norm_weights) if one.requires_grad]
        self.sums = {id(weight): WeightSum([weight]) for weight in self.weights}
        self.tied: Begun | None = None  # the sum of an embedding that is the head

    def block_loss(
        self, hidden_nD: torch.Tensor, target_n: torch.Tensor, max_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of -log p(target) in float32 (float64 for float64 models), and its terms [n], detached.

        At most `max_tokens` have logits at a time, on a GPU more; see `part_tokens`.
        """
        if self.tied is None and (weights := active_weights()) is not None and self.head_weights[0].requires_grad:
            self.tied = weights.begun(self.head_weights[0])
        return _BlockLoss.apply(self, max_tokens, target_n, hidden_nD)

    def total(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        token = None if self.tied is None else self.tied[1]  # autograd takes the embedding's sum after this
        return _Total.apply(self, len(losses), token, *losses, *self.weights)

    def compute(self, hidden_nD: torch.Tensor, target_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns losses [n] and the gradient [n, D] of the hidden states; adds the weights' gradients to the sums."""
        leaf_nD = normed_nD = hidden_nD.detach().requires_grad_(hidden_nD.requires_grad)
        leaves = [leaf_nD]
        if self.norm is not None:
            leaf_D = self.norm.weight.detach().requires_grad_(self.norm.weight.requires_grad)
            leaves.append(leaf_D)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
                # Does not call the module itself: a hook on all modules must not see an inner pass.
                normed_nD = rms_norm(leaf_nD, leaf_D, self.norm.variance_epsilon)
        weight_VD, *biases = [one.detach() for one in self.head_weights]
        logits_nV = linear(normed_nD.detach(), weight_VD, *biases)
        needed = normed_nD.requires_grad or any(weight.requires_grad for weight in self.head_weights)
        losses_n, gradient_nV = cross_entropy_and_gradient(logits_nV, target_n, needed)
        if gradient_nV is None:
            return losses_n, None
        del logits_nV
        weight, *biases = self.head_weights
        if weight.requires_grad and self.sums[id(weight)].total() is None:
            self.sums[id(weight)].give(gradient_nV.t() @ normed_nD.detach())
        elif weight.requires_grad:
            self.sums[id(weight)].add_product(gradient_nV.t(), normed_nD.detach())
        for bias in biases:
            if bias.requires_grad:
                self.sums[id(bias)].give(gradient_nV.sum(0))
        if not normed_nD.requires_grad:
            return losses_n, None
        of_normed_nD = linear(gradient_nV, weight_VD.t())
        if self.norm is None:
            return losses_n, of_normed_nD
        del gradient_nV
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = list(torch.autograd.grad(normed_nD, wanted, of_normed_nD))
        if self.norm.weight.requires_grad:
            self.sums[id(self.norm.weight)].give(found.pop())
        return losses_n, found[0] if found else None


def head_gradients(head: Callable, norm: nn.Module | None = None) -> HeadGradients | None:
    """Returns None if autograd must be used: not a plain `nn.Linear`, hooks, float16, whose loss is scaled before
    numbers are rounded, autocast, which would keep a cast weight for each call, torch.compile, torch.func."""
    if is_transformed() or type(head) is not nn.Linear or not _is_plain(head):
        return None
    if norm is not None and not (type(norm) is RMSNorm and _is_plain(norm)):
        return None
    if "weight" not in head._parameters or head.weight.dtype == torch.float16:
        return None
    return HeadGradients(head, norm) if autocast_dtype(head.weight.device) is None else None


def _is_plain(module: nn.Module) -> bool:
    """Returns whether the parameters are plain: replicas and sharded, parametrized or quantized modules have others."""
    if "forward" in module.__dict__ or has_hooks(module):
        return False
    return all(type(weight) in (nn.Parameter, type(None)) for weight in module._parameters.values())


def part_tokens(num_tokens: int, max_tokens: int, device_type: str, itemsize: int) -> int:
    """Returns the number of a block's tokens that have logits at a time: parts of equal size, except the last."""
    most = max_tokens * (1 if device_type == "cpu" else GPU_BYTES // itemsize)
    return ceil(num_tokens / ceil(num_tokens / most)) if num_tokens else 1


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients: HeadGradients, max_tokens: int, target_n, hidden_nD):
        itemsize = gradients.head_weights[0].dtype.itemsize
        at_once = part_tokens(len(hidden_nD), max_tokens, hidden_nD.device.type, itemsize)
        parts = zip(hidden_nD.split(at_once), target_n.split(at_once), strict=True)
        losses, found = zip(*(gradients.compute(*part) for part in parts), strict=True)
        ctx.save_for_backward(None if found[0] is None else _join(found))
        losses_n = _join(losses)
        ctx.mark_non_differentiable(losses_n)
        return losses_n.sum(), losses_n

    @staticmethod
    def backward(ctx, factor, _):
        _check_first_derivative()
        (gradient_nD,) = ctx.saved_tensors
        return None, None, None, None if gradient_nD is None else _scale(gradient_nD, factor, gradient_nD.dtype)


class _Total(torch.autograd.Function):
    """Saves the sums when they are complete: hooks that move saved tensors to the host must see their values.

    The gradient of a tied head is added to the embedding's, so autograd need not add two tensors of that size.
    """

    @staticmethod
    def forward(ctx, gradients: HeadGradients, num_losses: int, token, *tensors):
        ctx.num_losses, ctx.dtypes = num_losses, [weight.dtype for weight in gradients.weights]
        ctx.tied = None if gradients.tied is None else gradients.tied[0]
        ctx.save_for_backward(*(gradients.sums.pop(id(weight)).total() for weight in gradients.weights))
        return torch.stack(tensors[:num_losses]).sum()

    @staticmethod
    def backward(ctx, factor):
        _check_first_derivative()
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        found = [None if one is None else _scale(one, factor, dtype) for one, dtype in pairs]
        if ctx.tied is not None and found[0] is not None and may_be_summed(factor):
            ctx.tied.give(found[0])
            found[0] = None
        return None, None, None, *[factor] * ctx.num_losses, *found


def _scale(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the product, rounded once. CUDA rounds a 0-dimensional factor to the dtype of the other tensor, but not a
    factor with a dimension."""
    if gradient.is_cuda or gradient.dtype != dtype:
        return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))
    return gradient * factor


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _check_first_derivative() -> None:
    """Raises `ValueError` for create_graph: autograd would treat the gradients, computed earlier, as constants."""
    if torch.is_grad_enabled():
        raise ValueError(
            "create_graph=True: the gradients of a loss from labels are computed with it and can't be differentiated. "
            "Compute the loss from the logits of a call without labels."
        )


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
