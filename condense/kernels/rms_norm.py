"""A Llama's norm, on its own or of a sum, for one layer or for several at once.

A weight [D] applies to all rows; a weight [m, D] applies to m groups of consecutive rows, one for each of m layers.

Axes: x any axes, the first of which holds the m groups; D hidden size.
"""

import torch

from .availability import uses_kernels
from .derivatives import plain_gradients
from .layout import NEW, Places

MAX_WIDTH = 8192  # a program holds whole rows


def rms_norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns weight * x / sqrt(mean(x^2) + epsilon); a kernel keeps its input and one number for each row."""
    if takes_norm_kernel(hidden_xD, weight):
        return _Norm.apply(hidden_xD, None, weight, epsilon, False, NEW)[1]
    return plain_rms_norm(hidden_xD, weight, epsilon)


def input_and_rms_norm(
    hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float, places: Places = NEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input, for its further uses, and its norm: a kernel adds the gradients of both."""
    if takes_norm_kernel(hidden_xD, weight):
        return _Norm.apply(hidden_xD, None, weight, epsilon, True, places)
    return hidden_xD, plain_rms_norm(hidden_xD, weight, epsilon)


def add_rms_norm(
    hidden_xD: torch.Tensor, residual_xD: torch.Tensor, weight: torch.Tensor, epsilon: float, places: Places = NEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the two, and its norm."""
    alike = hidden_xD.shape == residual_xD.shape and hidden_xD.dtype == residual_xD.dtype
    if alike and takes_norm_kernel(hidden_xD, weight) and uses_kernels(residual_xD):
        return _Norm.apply(hidden_xD, residual_xD, weight, epsilon, True, places)
    return input_and_rms_norm(
        hidden_xD + residual_xD, weight, epsilon, places
    )  # under autocast the two differ in dtype


def plain_rms_norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if weight.dim() == 1:
        return _normed(hidden_xD, weight, epsilon)
    weight_m1D = weight.reshape(len(weight), *[1] * (hidden_xD.dim() - 1), -1)
    return _normed(hidden_xD.unflatten(0, (len(weight), -1)), weight_m1D, epsilon).flatten(0, 1)


def _normed(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide_xD = hidden_xD.to(torch.promote_types(hidden_xD.dtype, torch.float32))
    scale_x1 = torch.rsqrt(wide_xD.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide_xD * scale_x1).to(hidden_xD.dtype)


def takes_norm_kernel(hidden_xD: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = hidden_xD.dim() > 1 and hidden_xD.shape[-1] <= MAX_WIDTH and hidden_xD.device == weight.device
    return fits and uses_kernels(hidden_xD) and uses_kernels(weight)


class _Norm(torch.autograd.Function):
    """Returns the norm's input, which may be a sum, and the norm; without `keeps`, None for the input.

    The kernel of the backward pass adds the gradient of the input's other uses.
    """

    @staticmethod
    def forward(ctx, hidden_xD, residual_xD, weight, epsilon, keeps, places):
        from .triton_rms_norm import add_norm, norm

        if residual_xD is None:
            normed_xD, scale_n = norm(hidden_xD, weight, epsilon, places.normed)
            input_xD = hidden_xD
        else:
            input_xD, normed_xD, scale_n = add_norm(hidden_xD, residual_xD, weight, epsilon, places.normed)
        ctx.save_for_backward(input_xD, weight, scale_n)
        ctx.set_materialize_grads(False)  # one of the results may be unused
        ctx.epsilon, ctx.places = epsilon, places
        return input_xD if keeps else None, normed_xD

    @staticmethod
    def backward(ctx, of_kept_xD, of_normed_xD):
        of_input, of_weight = of_kept_xD, None
        if of_normed_xD is not None:
            of_input, of_weight = _gradients(ctx, of_normed_xD, of_kept_xD)
        of_residual = of_input if ctx.needs_input_grad[1] else None
        return of_input, of_residual, of_weight, None, None, None


def _gradients(ctx, of_normed_xD, of_kept_xD):
    """Returns the gradients of the norm's input, plus the gradient of its other uses, and of the weight."""
    input_xD, weight, scale_n = ctx.saved_tensors
    needs_weight = ctx.needs_input_grad[2] and ctx.places.of_weight is None
    if torch.is_grad_enabled():
        assert ctx.places.of_weight is None

        def plain(input_xD, weight):
            return plain_rms_norm(input_xD, weight, ctx.epsilon)

        needed = any(ctx.needs_input_grad[:2]), needs_weight
        of_input, of_weight = plain_gradients(plain, (input_xD, weight), needed, of_normed_xD)
        return of_input if of_kept_xD is None or of_input is None else of_input + of_kept_xD, of_weight
    from .triton_rms_norm import norm_gradients

    return norm_gradients(input_xD, weight, scale_n, of_normed_xD, of_kept_xD, needs_weight, ctx.places)
