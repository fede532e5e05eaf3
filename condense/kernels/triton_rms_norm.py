"""The kernels of `rms_norm`. They compute in float32.

A program of the forward pass processes as many rows as make a tile of some thousand elements. A program of the backward
pass processes several tiles of one group of rows, and sums the weight's gradient over them.

Axes: x any axes, n rows, D hidden size, m groups of rows, p programs of a group.
"""

import torch
import triton
import triton.language as tl

from .layout import as_rows, with_unit_stride

TILE = 2048  # elements, unless a row has more
PROGRAMS = 512  # of a backward pass: some for each multiprocessor


def norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed rows, and the factor [n] in float32 of each row."""
    hidden = as_rows(hidden_xD)
    normed_xD, scale_n = _launch_forward(hidden, hidden, hidden, weight, epsilon, hidden_xD.shape, adds=False)
    return normed_xD, scale_n


def add_norm(
    hidden_xD: torch.Tensor, residual_xD: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the sum, its norm, and the factor [n] in float32 of each row."""
    hidden, residual = as_rows(hidden_xD), as_rows(residual_xD)
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    normed_xD, scale_n = _launch_forward(hidden, residual, total, weight, epsilon, hidden_xD.shape, adds=True)
    return total.view(hidden_xD.shape), normed_xD, scale_n


def _launch_forward(hidden, residual, total, weight, epsilon, shape, adds):
    num_rows, width = hidden.shape
    weight_mD = _grouped(weight)
    normed = hidden.new_empty(shape, dtype=torch.promote_types(hidden.dtype, weight.dtype))
    scale_n = hidden.new_empty(num_rows, dtype=torch.float32)
    rows, options = _tile(width)
    with torch.cuda.device_of(hidden):
        _forward[(triton.cdiv(num_rows, rows),)](
            hidden,
            residual,
            total,
            weight_mD,
            normed,
            scale_n,
            num_rows,
            num_rows // len(weight_mD),
            width,
            hidden.stride(0),
            residual.stride(0),
            weight_mD.stride(0),
            epsilon,
            ADDS=adds,
            **options,
        )
    return normed, scale_n


def norm_gradients(
    input_xD: torch.Tensor,
    weight: torch.Tensor,
    scale_n: torch.Tensor,
    gradient_xD: torch.Tensor,
    other_xD: torch.Tensor | None,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradient of the norm's input, with `other_xD` added, and of the weight."""
    hidden, gradient = as_rows(input_xD), as_rows(gradient_xD)
    other = hidden if other_xD is None else as_rows(other_xD)
    weight_mD = _grouped(weight)
    (num_rows, width), groups = hidden.shape, len(weight_mD)
    rows, options = _tile(width)
    tiles = triton.cdiv(num_rows // groups, rows)  # of a group
    # A constant of the kernel: powers of 2 keep the variants few, and the interpreter can't loop to a tensor.
    tiles_per_program = triton.next_power_of_2(triton.cdiv(tiles, max(PROGRAMS // groups, 1)))
    programs = triton.cdiv(tiles, tiles_per_program)
    of_input = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    partial_mpD = hidden.new_empty((groups, programs, width) if needs_weight else 1, dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        _backward[(groups, programs)](
            hidden,
            gradient,
            other,
            weight_mD,
            scale_n,
            of_input,
            partial_mpD,
            num_rows // groups,
            programs,
            width,
            hidden.stride(0),
            gradient.stride(0),
            other.stride(0),
            weight_mD.stride(0),
            ADDS=other_xD is not None,
            NEEDS_WEIGHT=needs_weight,
            TILES=tiles_per_program,
            **options,
        )
    of_weight = partial_mpD.sum(1).to(weight.dtype).view(weight.shape) if needs_weight else None
    return of_input.view(input_xD.shape), of_weight


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    return with_unit_stride(weight[None] if weight.dim() == 1 else weight)


def _tile(width: int) -> tuple[int, dict[str, int]]:
    """Returns the number of rows of a tile, and the compilation options of the kernels."""
    block = triton.next_power_of_2(width)
    rows = max(TILE // block, 1)
    return rows, {"ROWS": rows, "BLOCK": block, "num_warps": min(rows * block // 256, 16)}


@triton.jit
def _forward(
    hidden,
    residual,
    total,
    weight,
    normed,
    scales,
    num_rows,
    rows_per_group,
    width,
    hidden_stride,
    residual_stride,
    weight_stride,
    epsilon,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    place = row[:, None] * width + column

    rounded = tl.load(hidden + row[:, None] * hidden_stride + column, mask=inside, other=0.0)
    x = rounded.to(tl.float32)
    if ADDS:
        other = tl.load(residual + row[:, None] * residual_stride + column, mask=inside, other=0.0)
        rounded = (x + other.to(tl.float32)).to(rounded.dtype)
        tl.store(total + place, rounded, mask=inside)
        x = rounded.to(tl.float32)

    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + epsilon)
    tl.store(scales + row, scale, mask=row < num_rows)
    group = row // rows_per_group
    w = tl.load(weight + group[:, None] * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = x * scale[:, None] * w
    tl.store(normed + place, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    hidden,
    gradient,
    other,
    weight,
    scales,
    of_input,
    partials,
    rows_per_group,
    programs,
    width,
    hidden_stride,
    gradient_stride,
    other_stride,
    weight_stride,
    ADDS: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + group * weight_stride + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)

    for tile in range(TILES):
        row_of_group = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        has_row = row_of_group < rows_per_group
        row = group * rows_per_group + row_of_group
        inside = has_row[:, None] & (column < width)
        x = tl.load(hidden + row[:, None] * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(gradient + row[:, None] * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=has_row, other=0.0)

        unit = x * scale[:, None]  # the input divided by its root mean square
        of_unit = d * w
        along = tl.sum(of_unit * unit, axis=1) / width
        value = scale[:, None] * (of_unit - unit * along[:, None])
        if ADDS:
            value += tl.load(other + row[:, None] * other_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_input + row[:, None] * width + column, value.to(of_input.dtype.element_ty), mask=inside)
        of_weight += d * unit

    if NEEDS_WEIGHT:
        place = (group * programs + program) * width + tl.arange(0, BLOCK)
        tl.store(partials + place, tl.sum(of_weight, axis=0), mask=tl.arange(0, BLOCK) < width)
