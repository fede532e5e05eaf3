"""The kernels of `swiglu`: one program for each block of a row. They compute in float32.

Axes: x any axes, m parts of n rows that may lie apart in memory, F intermediate size.
"""

import torch
import triton
import triton.language as tl

from .layout import as_rows, part_sizes
from .triton_layout import row_offset

BLOCK = 1024


def silu_product_into(product_mnF: torch.Tensor, gate_xF: torch.Tensor, up_xF: torch.Tensor) -> None:
    gate, up = as_rows(gate_xF), as_rows(up_xF)
    grid, options = _launch(gate)
    strides = gate.stride(0), up.stride(0)
    with torch.cuda.device_of(gate):
        _forward[grid](gate, up, product_mnF, gate.shape[1], *strides, *part_sizes(product_mnF), **options)


def silu_product_gradients_into(
    both_mnF: torch.Tensor, gate_xF: torch.Tensor, up_xF: torch.Tensor, gradient_xF: torch.Tensor
) -> None:
    """Writes the gradients of gate and up side by side into rows of width 2 F."""
    gate, up, gradient = as_rows(gate_xF), as_rows(up_xF), as_rows(gradient_xF)
    grid, options = _launch(gate)
    strides = gate.stride(0), up.stride(0), gradient.stride(0)
    with torch.cuda.device_of(gate):
        _backward[grid](gate, up, gradient, both_mnF, gate.shape[1], *strides, *part_sizes(both_mnF), **options)


def _launch(rows_nF: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    num_rows, width = rows_nF.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    return (num_rows, triton.cdiv(width, block)), {"BLOCK": block, "num_warps": min(max(block // 256, 1), 4)}


@triton.jit
def _forward(gate, up, product, width, gate_stride, up_stride, part_rows, part_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = g * tl.sigmoid(g) * u
    product += row_offset(tl.program_id(0), part_rows, part_stride, width)
    tl.store(product + column, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate, up, gradient, both, width, gate_stride, up_stride, gradient_stride, part_rows, part_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    for_gate = d * u * (sigmoid + silu * (1.0 - sigmoid))
    both += row_offset(tl.program_id(0), part_rows, part_stride, 2 * width)
    tl.store(both + column, for_gate.to(both.dtype.element_ty), mask=inside)
    tl.store(both + width + column, (d * silu).to(both.dtype.element_ty), mask=inside)
