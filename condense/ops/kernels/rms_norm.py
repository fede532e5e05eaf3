"""A Llama's norm, on its own or of a sum, for one layer or for several at once.

A weight [D] applies to all rows; a weight [m, D] applies to m groups of consecutive rows, one for each of m layers.

Axes: x any axes, the first of which holds the m groups; D hidden size.
"""

import torch
import torch.nn.functional as F

from .availability import uses_kernels
from .derivatives import plain_gradients

MAX_WIDTH = 8192  # a program holds whole rows


def rms_norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns weight * x / sqrt(mean(x^2) + epsilon). On CUDA a kernel keeps its input and one number for each row; in
    float32 without gradients it is one operation on a CPU, too."""
    if takes_norm_kernel(hidden_xD, weight):
        return _Norm.apply(hidden_xD, None, weight, epsilon, False, None, None, None)[1]
    return _without_kernel(hidden_xD, weight, epsilon)


def input_and_rms_norm(
    hidden_xD: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    normed_mnD: torch.Tensor | None = None,
    of_input_mnD: torch.Tensor | None = None,
    of_weight_mpD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input, for its further uses, and its norm: a kernel adds the gradients of both.

    Kernels write the norm to `normed_mnD` and the gradient of the input to `of_input_mnD`, if given. They add the
    gradient of the weight to `of_weight_mpD`, in p parts (`num_parts`) of float32: the weight itself receives none, but
    must require one.
    """
    if takes_norm_kernel(hidden_xD, weight):
        return _Norm.apply(hidden_xD, None, weight, epsilon, True, normed_mnD, of_input_mnD, of_weight_mpD)
    return hidden_xD, _without_kernel(hidden_xD, weight, epsilon)


def add_rms_norm(
    hidden_xD: torch.Tensor,
    residual_xD: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    normed_mnD: torch.Tensor | None = None,
    of_input_mnD: torch.Tensor | None = None,
    of_weight_mpD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Works as `input_and_rms_norm`, for the sum of the two."""
    memory = normed_mnD, of_input_mnD, of_weight_mpD
    alike = hidden_xD.shape == residual_xD.shape and hidden_xD.dtype == residual_xD.dtype
    if alike and takes_norm_kernel(hidden_xD, weight) and uses_kernels(residual_xD):
        return _Norm.apply(hidden_xD, residual_xD, weight, epsilon, True, *memory)
    return input_and_rms_norm(hidden_xD + residual_xD, weight, epsilon, *memory)  # under autocast dtypes may differ


def num_parts(rows: int, width: int) -> int:
    """Returns the number of parts in which kernels add up the gradient of a layer's weight, for its rows in a call."""
    from .triton_rms_norm import shared_programs

    return shared_programs(rows, width)


def _without_kernel(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if not is_one_operation(hidden_xD):
        return plain_rms_norm(hidden_xD, weight, epsilon)
    if weight.dim() == 1:
        return F.rms_norm(hidden_xD, weight.shape, weight, epsilon)
    grouped_mxD = hidden_xD.unflatten(0, (len(weight), -1))
    return (_by_group(weight, grouped_mxD) * F.rms_norm(grouped_mxD, weight.shape[-1:], None, epsilon)).flatten(0, 1)


def is_one_operation(hidden_xD: torch.Tensor) -> bool:
    """Returns whether `F.rms_norm` computes a norm that has no kernel."""
    return hidden_xD.is_cuda or (hidden_xD.dtype == torch.float32 and not torch.is_grad_enabled())


def plain_rms_norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Computes the norm with a Llama's roundings: all but the weight in float32, or in float64 for a float64 model."""
    if weight.dim() == 1:
        return _norm(hidden_xD, weight, epsilon)
    grouped_mxD = hidden_xD.unflatten(0, (len(weight), -1))
    return _norm(grouped_mxD, _by_group(weight, grouped_mxD), epsilon).flatten(0, 1)


def _by_group(weight_mD: torch.Tensor, grouped_mxD: torch.Tensor) -> torch.Tensor:
    return weight_mD.view(len(weight_mD), *[1] * (grouped_mxD.dim() - 2), -1)


def _norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide_xD = hidden_xD if hidden_xD.dtype == torch.float64 else hidden_xD.float()
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
    def forward(ctx, hidden_xD, residual_xD, weight, epsilon, keeps, normed_mnD, of_input_mnD, of_weight_mpD):
        from .triton_rms_norm import add_norm, norm

        if residual_xD is None:
            normed_xD, scale_n = norm(hidden_xD, weight, epsilon, normed_mnD)
            input_xD = hidden_xD
        else:
            input_xD, normed_xD, scale_n = add_norm(hidden_xD, residual_xD, weight, epsilon, normed_mnD)
        ctx.save_for_backward(input_xD, weight, scale_n)
        ctx.set_materialize_grads(False)  # one of the results may be unused
        ctx.epsilon, ctx.of_input_mnD, ctx.of_weight_mpD = epsilon, of_input_mnD, of_weight_mpD
        return input_xD if keeps else None, normed_xD

    @staticmethod
    def backward(ctx, of_kept_xD, of_normed_xD):
        of_input, of_weight = of_kept_xD, None
        if of_normed_xD is not None:
            of_input, of_weight = _gradients(ctx, of_normed_xD, of_kept_xD)
        of_residual = of_input if ctx.needs_input_grad[1] else None
        return of_input, of_residual, of_weight, *[None] * 5


def _gradients(ctx, of_normed_xD, of_kept_xD):
    """Returns the gradients of the norm's input, plus the gradient of its other uses, and of the weight."""
    input_xD, weight, scale_n = ctx.saved_tensors
    needs_weight = ctx.needs_input_grad[2] and ctx.of_weight_mpD is None
    if torch.is_grad_enabled():
        assert ctx.of_weight_mpD is None

        def plain(input_xD, weight):
            return plain_rms_norm(input_xD, weight, ctx.epsilon)

        needed = any(ctx.needs_input_grad[:2]), needs_weight
        of_input, of_weight = plain_gradients(plain, (input_xD, weight), needed, of_normed_xD)
        return of_input if of_kept_xD is None or of_input is None else of_input + of_kept_xD, of_weight
    from .triton_rms_norm import norm_gradients

    memory = ctx.of_input_mnD, ctx.of_weight_mpD
    return norm_gradients(input_xD, weight, scale_n, of_normed_xD, of_kept_xD, needs_weight, *memory)
