"""A Llama's norm, on its own or of a sum, for one layer or for several at once.

A weight [D] applies to all rows; a weight [m, D] applies to m groups of consecutive rows, one for each of m layers.

Axes: x any axes, the first of which holds the m groups; D hidden size.
"""

import torch

from .availability import uses_kernels
from .derivatives import plain_gradients

MAX_WIDTH = 8192  # a program holds whole rows


def rms_norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns weight * x / sqrt(mean(x^2) + epsilon); a kernel keeps its input and one number for each row."""
    if takes_norm_kernel(hidden_xD, weight):
        return _Norm.apply(hidden_xD, weight, epsilon)
    return plain_rms_norm(hidden_xD, weight, epsilon)


def add_rms_norm(
    hidden_xD: torch.Tensor, residual_xD: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the two, and its norm."""
    alike = hidden_xD.shape == residual_xD.shape and hidden_xD.dtype == residual_xD.dtype
    if alike and takes_norm_kernel(hidden_xD, weight) and uses_kernels(residual_xD):
        return _AddNorm.apply(hidden_xD, residual_xD, weight, epsilon)
    sum_xD = hidden_xD + residual_xD
    return sum_xD, rms_norm(sum_xD, weight, epsilon)  # under autocast the two differ in dtype


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
    @staticmethod
    def forward(ctx, hidden_xD, weight, epsilon):
        from .triton_rms_norm import norm

        normed_xD, scale_n = norm(hidden_xD, weight, epsilon)
        ctx.save_for_backward(hidden_xD, weight, scale_n)
        ctx.epsilon = epsilon
        return normed_xD

    @staticmethod
    def backward(ctx, gradient_xD):
        hidden_xD, weight, scale_n = ctx.saved_tensors
        return *_gradients(ctx, hidden_xD, weight, scale_n, ctx.needs_input_grad[:2], gradient_xD, None), None


class _AddNorm(torch.autograd.Function):
    """Adds the sum's own gradient in the kernel of the norm's gradient."""

    @staticmethod
    def forward(ctx, hidden_xD, residual_xD, weight, epsilon):
        from .triton_rms_norm import add_norm

        sum_xD, normed_xD, scale_n = add_norm(hidden_xD, residual_xD, weight, epsilon)
        ctx.save_for_backward(sum_xD, weight, scale_n)
        ctx.set_materialize_grads(False)  # one of the results may be unused
        ctx.epsilon = epsilon
        return sum_xD, normed_xD

    @staticmethod
    def backward(ctx, of_sum_xD, of_normed_xD):
        if of_normed_xD is None:
            return of_sum_xD, of_sum_xD, None, None
        sum_xD, weight, scale_n = ctx.saved_tensors
        needed = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        of_input, of_weight = _gradients(ctx, sum_xD, weight, scale_n, needed, of_normed_xD, of_sum_xD)
        return of_input, of_input, of_weight, None


def _gradients(ctx, input_xD, weight, scale_n, needed, gradient_xD, other_xD):
    """Returns the gradients of the norm's input, plus the gradient of its other use, and of the weight."""
    if torch.is_grad_enabled():

        def plain(input_xD, weight):
            return plain_rms_norm(input_xD, weight, ctx.epsilon)

        of_input, of_weight = plain_gradients(plain, (input_xD, weight), needed, gradient_xD)
        return of_input if other_xD is None or of_input is None else of_input + other_xD, of_weight
    from .triton_rms_norm import norm_gradients

    return norm_gradients(input_xD, weight, scale_n, gradient_xD, other_xD, needs_weight=needed[1])
