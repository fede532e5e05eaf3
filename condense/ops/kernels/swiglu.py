"""The gated product of a Llama's feed-forward network.

Axes: x any axes, m parts of n rows that may lie apart in memory, F intermediate size.
"""

import torch
import torch.nn.functional as F

from .availability import uses_kernels
from .derivatives import plain_gradients
from .layout import given_or_new


def silu_product(
    gate_xF: torch.Tensor,
    up_xF: torch.Tensor,
    product_mnF: torch.Tensor | None = None,
    of_both_mnx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns silu(gate) * up; a kernel keeps only the two for the backward pass.

    A kernel writes the product to `product_mnF`, and the two gradients side by side to `of_both_mnx`, if given.
    """
    alike = gate_xF.shape == up_xF.shape and gate_xF.dtype == up_xF.dtype and gate_xF.device == up_xF.device
    if alike and gate_xF.dim() > 0 and uses_kernels(gate_xF) and uses_kernels(up_xF):
        return _SiluProduct.apply(gate_xF, up_xF, product_mnF, of_both_mnx)
    return plain_silu_product(gate_xF, up_xF)


def plain_silu_product(gate_xF: torch.Tensor, up_xF: torch.Tensor) -> torch.Tensor:
    return F.silu(gate_xF) * up_xF


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_xF, up_xF, product_mnF, of_both_mnx):
        from .triton_swiglu import silu_product_into

        ctx.save_for_backward(gate_xF, up_xF)
        ctx.of_both_mnx = of_both_mnx
        width = gate_xF.shape[-1]
        product_mnF = given_or_new(product_mnF, gate_xF.numel() // width, width, gate_xF)
        silu_product_into(product_mnF, gate_xF, up_xF)
        return product_mnF.view(gate_xF.shape)

    @staticmethod
    def backward(ctx, gradient_xF):
        from .triton_swiglu import silu_product_gradients_into

        gate_xF, up_xF = ctx.saved_tensors
        if torch.is_grad_enabled():
            needed = ctx.needs_input_grad[:2]
            return *plain_gradients(plain_silu_product, (gate_xF, up_xF), needed, gradient_xF), None, None
        width = gate_xF.shape[-1]
        # Side by side, like the weights that they come from: a single product leads to the input.
        of_both_mnx = given_or_new(ctx.of_both_mnx, gate_xF.numel() // width, 2 * width, gate_xF)
        silu_product_gradients_into(of_both_mnx, gate_xF, up_xF, gradient_xF)
        of_both_xx = of_both_mnx.view(*gate_xF.shape[:-1], 2 * width)
        return of_both_xx[..., :width], of_both_xx[..., width:], None, None
