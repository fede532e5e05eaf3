"""The kernel of `rotary`: a program processes some tokens of a row and some heads, and reads the tables once.

Axes: R rows of a chunk, T tokens of a chunk, H heads, E head dimension, 1 a broadcast axis.
"""

import torch
import triton
import triton.language as tl

from .layout import with_unit_stride

TILE = 1024  # elements of half the head dimension
HEADS = 4  # of a program


def rotate_into(
    output_RHTE: torch.Tensor,
    tensor_RHTE: torch.Tensor,
    cos_R1TE: torch.Tensor,
    sin_R1TE: torch.Tensor,
    inverse: bool,
) -> None:
    """Writes x cos + roll(x) sin or, with `inverse`, x cos + roll(x sin)."""
    tensor, cos, sin = with_unit_stride(tensor_RHTE), with_unit_stride(cos_R1TE), with_unit_stride(sin_R1TE)
    _, heads, width, _ = tensor.shape
    grid, token_blocks, sizes = launch_sizes(tensor.shape)
    with torch.cuda.device_of(tensor):
        _rotate[grid](
            tensor,
            cos,
            sin,
            output_RHTE,
            heads,
            width,
            token_blocks,
            *tensor.stride()[:3],
            *row_and_token_strides(cos),
            *row_and_token_strides(sin),
            *output_RHTE.stride()[:3],
            INVERSE=inverse,
            **sizes,
        )


def launch_sizes(shape: torch.Size) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Returns the grid, its programs along the tokens, and the constants of a kernel that writes a tensor with these
    rows, heads, tokens and head dimension."""
    num_rows, heads, width, size = shape
    block = triton.next_power_of_2(size // 2)
    tokens = min(max(TILE // block, 1), triton.next_power_of_2(width))
    token_blocks = triton.cdiv(width, tokens)
    constants = {"HEADS": HEADS, "TOKENS": tokens, "HALF": size // 2, "BLOCK": block}
    num_warps = min(max(tokens * block // 256, 1), 4)
    return (num_rows * token_blocks, triton.cdiv(heads, HEADS)), token_blocks, constants | {"num_warps": num_warps}


def row_and_token_strides(table_R1TE: torch.Tensor) -> tuple[int, int]:
    return 0 if len(table_R1TE) == 1 else table_R1TE.stride(0), table_R1TE.stride(2)


@triton.jit
def _rotate(
    tensor,
    cos,
    sin,
    output,
    heads,
    width,
    token_blocks,
    tensor_row,
    tensor_head,
    tensor_token,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    output_row,
    output_head,
    output_token,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // token_blocks).to(tl.int64)
    first_token = (tl.program_id(0) % token_blocks) * TOKENS
    token = (first_token + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    inside = (token < width) & (element < HALF)

    cos += row * cos_row + token * cos_token + element
    sin += row * sin_row + token * sin_token + element
    tensor += row * tensor_row + token * tensor_token + element
    output += row * output_row + token * output_token + element
    first_head = tl.program_id(1) * HEADS
    rotate_heads(tensor, tensor_head, output, output_head, first_head, heads, cos, sin, inside, INVERSE, HEADS, HALF)


@triton.jit
def rotate_heads(
    tensor,
    tensor_head,
    output,
    output_head,
    first_head,
    heads,
    cos,
    sin,
    inside,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Writes the rotation of some heads, or with `INVERSE` its gradient; all pointers are to tokens' elements."""
    first_cos = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + HALF, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:  # the product with sin comes before the halves are exchanged
        second_sin = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
        first_sin = tl.load(sin + HALF, mask=inside, other=0.0).to(tl.float32)
    else:
        first_sin = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
        second_sin = tl.load(sin + HALF, mask=inside, other=0.0).to(tl.float32)
    for number in range(HEADS):
        head = (first_head + number).to(tl.int64)
        exists = inside & (head < heads)
        source, place = tensor + head * tensor_head, output + head * output_head
        first = tl.load(source, mask=exists, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)
        rotated_first = first * first_cos + second * first_sin
        rotated_second = second * second_cos + first * second_sin
        tl.store(place, rotated_first.to(place.dtype.element_ty), mask=exists)
        tl.store(place + HALF, rotated_second.to(place.dtype.element_ty), mask=exists)
