"""The kernels of `swiglu`: one program for each block of a row. They compute in float32.

Axes: x any axes, F intermediate size.
"""

import torch
import triton
import triton.language as tl

from .layout import as_rows

BLOCK = 1024


def silu_product(gate_xF: torch.Tensor, up_xF: torch.Tensor) -> torch.Tensor:
    gate, up = as_rows(gate_xF), as_rows(up_xF)
    product = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grid, options = _launch(gate)
    with torch.cuda.device_of(gate):
        _forward[grid](gate, up, product, gate.shape[1], gate.stride(0), up.stride(0), **options)
    return product.view(gate_xF.shape)


def silu_product_gradients(
    gate_xF: torch.Tensor, up_xF: torch.Tensor, gradient_xF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both lie side by side, as the weights do that they come from: one product takes them to the input."""
    gate, up, gradient = as_rows(gate_xF), as_rows(up_xF), as_rows(gradient_xF)
    width = gate.shape[1]
    both_xF = gate.new_empty(*gate_xF.shape[:-1], 2 * width)
    of_gate, of_up = both_xF.view(-1, 2 * width).split(width, dim=1)
    grid, options = _launch(gate)
    strides = gate.stride(0), up.stride(0), gradient.stride(0)
    with torch.cuda.device_of(gate):
        _backward[grid](gate, up, gradient, of_gate, of_up, width, *strides, **options)
    return both_xF[..., :width], both_xF[..., width:]


def _launch(rows_nF: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    num_rows, width = rows_nF.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    return (num_rows, triton.cdiv(width, block)), {"BLOCK": block, "num_warps": min(max(block // 256, 1), 4)}


@triton.jit
def _forward(gate, up, product, width, gate_stride, up_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * u
    tl.store(product + row * width + column, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate, up, gradient, of_gate, of_up, width, gate_stride, up_stride, gradient_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    for_gate = d * u * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(of_gate + row * 2 * width + column, for_gate.to(of_gate.dtype.element_ty), mask=inside)
    tl.store(of_up + row * 2 * width + column, (d * silu).to(of_up.dtype.element_ty), mask=inside)
