"""Products of one input with several stacks of weights, whose gradients are summed in float32.

Axes: m layers of a band, n rows and tokens of a layer together, I and O input and output widths.
"""

from collections.abc import Callable, Sequence

import torch

from ..ops.products import side_by_side, stacked_products
from ..ops.shared_weights import may_be_summed
from ..ops.weight_sum import WeightSum

Gradients = Sequence[torch.Tensor | None]
Add = Callable[[Gradients, torch.Tensor], None]  # the products of gradients [m, n, O] with their input to the sums


def summed_products(
    add: Add, input_mnI: torch.Tensor, weights: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor]:
    """Returns the products [m, n, O] with stacks of weights [m, O, I]. The backward pass calls `add` with the gradients
    of the products whose weights are trained, and `tokens` lead to these weights."""
    return _StackedProducts.apply(add, input_mnI, *weights, *tokens)


def add_products(
    sums: Sequence[WeightSum | None], layers: slice, gradients: Gradients, input_mnI: torch.Tensor
) -> None:
    """Adds the products of gradients with their common input to the sums of stacks, for some layers."""
    for one, gradient_mnO in zip(sums, gradients, strict=True):
        if one is not None and gradient_mnO is not None:
            one.add_product(gradient_mnO.transpose(1, 2), input_mnI, layers)


class _StackedProducts(torch.autograd.Function):
    """The products add their gradients of the input."""

    @staticmethod
    def forward(ctx, add: Add, input_mnI, *weights_and_tokens):
        ctx.set_materialize_grads(False)
        ctx.add = add
        weights = weights_and_tokens[: len(weights_and_tokens) // 2]
        ctx.save_for_backward(input_mnI, *weights)
        return tuple(stacked_products(input_mnI, weights))

    @staticmethod
    def backward(ctx, *gradients):
        input_mnI, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + len(weights)]
        known = [pair for pair in zip(gradients, weights, strict=True) if pair[0] is not None]
        in_place = all(may_be_summed(gradient_mnO) for gradient_mnO, _ in known)
        of_input = _sum_of_products(known, in_place) if ctx.needs_input_grad[1] and known else None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        wanted = [one if need else None for one, need in zip(gradients, needed, strict=True)]
        if in_place:
            ctx.add(wanted, input_mnI)
        else:
            of_weights = [None if one is None else torch.bmm(one.transpose(1, 2), input_mnI) for one in wanted]
        return None, of_input, *of_weights, *[None] * len(weights)


def _sum_of_products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], in_place: bool) -> torch.Tensor:
    """Returns the sum of products of gradients [m, n, O] and weights [m, O, I]: one product if both lie adjacent."""
    gradients, weights = zip(*pairs, strict=True)
    if in_place and len(pairs) > 1:
        joint_mnO, joint_mOI = side_by_side(gradients, dim=2), side_by_side(weights, dim=1)
        if joint_mnO is not None and joint_mOI is not None:
            return torch.bmm(joint_mnO, joint_mOI)
    total_mnI = torch.bmm(gradients[0], weights[0])
    for gradient_mnO, weight_mOI in pairs[1:]:
        if in_place:
            total_mnI.baddbmm_(gradient_mnO, weight_mOI)
        else:
            total_mnI = total_mnI + torch.bmm(gradient_mnO, weight_mOI)
    return total_mnI
