"""The kernels of `rms_norm`. They compute in float32.

A program of the forward pass processes as many rows as make a tile of some thousand elements. A program of the backward
pass processes several tiles of one group of rows, and sums the weight's gradient over them.

Axes: x any axes, n rows, D hidden size, m groups of rows (or parts of a result), p programs of a group.
"""

import torch
import triton
import triton.language as tl

from .layout import as_parts, as_rows, given_or_new, part_sizes, with_unit_stride
from .triton_layout import row_offset

TILE = 2048  # elements, unless a row has more
PROGRAMS = 512  # of a backward pass: some for each multiprocessor
SHARED_BY = 2  # layers at least, if programs add to partial sums: these grow with the programs of a layer


def norm(
    hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float, normed_mnD: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed rows, and the factor [n] in float32 of each row."""
    hidden = as_rows(hidden_xD)
    normed_xD, scale_n = _launch_forward(
        hidden, hidden, hidden, weight, epsilon, hidden_xD.shape, normed_mnD, adds=False
    )
    return normed_xD, scale_n


def add_norm(
    hidden_xD: torch.Tensor,
    residual_xD: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    normed_mnD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the sum, its norm, and the factor [n] in float32 of each row."""
    hidden, residual = as_rows(hidden_xD), as_rows(residual_xD)
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    normed_xD, scale_n = _launch_forward(
        hidden, residual, total, weight, epsilon, hidden_xD.shape, normed_mnD, adds=True
    )
    return total.view(hidden_xD.shape), normed_xD, scale_n


def _launch_forward(hidden, residual, total, weight, epsilon, shape, normed_mnD, adds):
    num_rows, width = hidden.shape
    weight_mD = _group(weight)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    normed_mnD = given_or_new(normed_mnD, num_rows, width, hidden.new_empty(0, dtype=dtype))
    scale_n = hidden.new_empty(num_rows, dtype=torch.float32)
    tile_rows, options = _tile(width)
    with torch.cuda.device_of(hidden):
        _forward[(triton.cdiv(num_rows, tile_rows),)](
            hidden,
            residual,
            total,
            weight_mD,
            normed_mnD,
            scale_n,
            num_rows,
            num_rows // len(weight_mD),
            width,
            hidden.stride(0),
            residual.stride(0),
            weight_mD.stride(0),
            *part_sizes(normed_mnD),
            epsilon,
            ADDS=adds,
            **options,
        )
    return normed_mnD.view(shape), scale_n


def norm_gradients(
    input_xD: torch.Tensor,
    weight: torch.Tensor,
    scale_n: torch.Tensor,
    gradient_xD: torch.Tensor,
    other_xD: torch.Tensor | None,
    needs_weight: bool,
    of_input_mnD: torch.Tensor | None = None,
    of_weight_mpD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradient of the norm's input, with `other_xD` added, and of the weight."""
    hidden, gradient = as_rows(input_xD), as_rows(gradient_xD)
    other_mnD = hidden[None] if other_xD is None else as_parts(other_xD)
    weight_mD = _group(weight)
    (num_rows, width), groups = hidden.shape, len(weight_mD)
    tile_rows, options = _tile(width)
    tiles = triton.cdiv(num_rows // groups, tile_rows)  # of a group
    tiles_per_program, programs = _programs(tiles, groups)
    of_input_mnD = given_or_new(of_input_mnD, num_rows, width, hidden)
    partial_mpD = of_weight_mpD
    if partial_mpD is not None:
        # Bands of other layers have no more programs for each layer than a single layer has.
        tiles_per_program, programs = _programs(tiles, max(groups, SHARED_BY))
        assert programs <= partial_mpD.shape[1]
    else:
        partial_mpD = hidden.new_empty((groups, programs, width) if needs_weight else (1, 1, 1), dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        _backward[(groups, programs)](
            hidden,
            gradient,
            other_mnD,
            weight_mD,
            scale_n,
            of_input_mnD,
            partial_mpD,
            num_rows // groups,
            width,
            hidden.stride(0),
            gradient.stride(0),
            weight_mD.stride(0),
            other_mnD.shape[1],
            *other_mnD.stride()[:2],
            *part_sizes(of_input_mnD),
            partial_mpD.stride(0),
            ADDS=other_xD is not None,
            NEEDS_WEIGHT=needs_weight or of_weight_mpD is not None,
            ADDS_TO_PARTIALS=of_weight_mpD is not None,
            TILES=tiles_per_program,
            **options,
        )
    of_weight = partial_mpD.sum(1).to(weight.dtype).view(weight.shape) if needs_weight else None
    return of_input_mnD.view(input_xD.shape), of_weight


def shared_programs(rows: int, width: int) -> int:
    """Returns the most programs for the rows of a layer, if programs add to partial sums."""
    return _programs(triton.cdiv(rows, _tile(width)[0]), SHARED_BY)[1]


def _programs(tiles: int, groups: int) -> tuple[int, int]:
    """Returns the tiles of each program, and the programs of each group.

    The tiles are a constant of the kernel: powers of 2 keep the variants few, and the interpreter can't loop to a
    tensor.
    """
    tiles_per_program = triton.next_power_of_2(triton.cdiv(tiles, max(PROGRAMS // groups, 1)))
    return tiles_per_program, triton.cdiv(tiles, tiles_per_program)


def _group(weight: torch.Tensor) -> torch.Tensor:
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
    part_rows,
    part_stride,
    epsilon,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = number.to(tl.int64)
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
    normed += row_offset(number, part_rows, part_stride, width)[:, None] + column
    tl.store(normed, value.to(normed.dtype.element_ty), mask=inside)


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
    width,
    hidden_stride,
    gradient_stride,
    weight_stride,
    other_part_rows,
    other_part_stride,
    other_stride,
    part_rows,
    part_stride,
    partial_stride,
    ADDS: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ADDS_TO_PARTIALS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, program = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + group.to(tl.int64) * weight_stride + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)

    for tile in range(TILES):
        row_of_group = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        has_row = row_of_group < rows_per_group
        number = group * rows_per_group + row_of_group
        row = number.to(tl.int64)
        inside = has_row[:, None] & (column < width)
        x = tl.load(hidden + row[:, None] * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(gradient + row[:, None] * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=has_row, other=0.0)

        unit = x * scale[:, None]  # the input divided by its root mean square
        of_unit = d * w
        along = tl.sum(of_unit * unit, axis=1) / width
        value = scale[:, None] * (of_unit - unit * along[:, None])
        if ADDS:
            place = other + row_offset(number, other_part_rows, other_part_stride, other_stride)[:, None] + column
            value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        place = of_input + row_offset(number, part_rows, part_stride, width)[:, None] + column
        tl.store(place, value.to(of_input.dtype.element_ty), mask=inside)
        of_weight += d * unit

    if NEEDS_WEIGHT:
        element = tl.arange(0, BLOCK)
        place = partials + group.to(tl.int64) * partial_stride + program * width + element
        total = tl.sum(of_weight, axis=0)
        if ADDS_TO_PARTIALS:
            total += tl.load(place, mask=element < width, other=0.0)
        tl.store(place, total, mask=element < width)
