"""Second derivatives of functions whose first derivatives are kernels."""

from collections.abc import Callable, Sequence

import torch


def plain_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    needed: Sequence[bool],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Differentiates a plain form, so that its gradients have derivatives: for a backward pass with create_graph."""
    with torch.enable_grad():
        views = [tensor.view_as(tensor) for tensor in inputs]  # inputs may be computed from each other
        wanted = [view for view, is_needed in zip(views, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(function(*views), wanted, gradient, create_graph=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)
