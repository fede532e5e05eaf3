"""The gated product of a Llama's feed-forward network.

Axes: x any axes, F intermediate size.
"""

import torch
import torch.nn.functional as F

from .availability import uses_kernels
from .derivatives import plain_gradients


def silu_product(gate_xF: torch.Tensor, up_xF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; a kernel keeps nothing but the two for the backward pass."""
    alike = gate_xF.shape == up_xF.shape and gate_xF.dtype == up_xF.dtype and gate_xF.device == up_xF.device
    if alike and gate_xF.dim() > 0 and uses_kernels(gate_xF) and uses_kernels(up_xF):
        return _SiluProduct.apply(gate_xF, up_xF)
    return plain_silu_product(gate_xF, up_xF)


def plain_silu_product(gate_xF: torch.Tensor, up_xF: torch.Tensor) -> torch.Tensor:
    return F.silu(gate_xF) * up_xF


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_xF, up_xF):
        from .triton_swiglu import silu_product

        ctx.save_for_backward(gate_xF, up_xF)
        return silu_product(gate_xF, up_xF)

    @staticmethod
    def backward(ctx, gradient_xF):
        from .triton_swiglu import silu_product_gradients

        gate_xF, up_xF = ctx.saved_tensors
        if torch.is_grad_enabled():
            return plain_gradients(plain_silu_product, (gate_xF, up_xF), ctx.needs_input_grad, gradient_xF)
        return silu_product_gradients(gate_xF, up_xF, gradient_xF)
