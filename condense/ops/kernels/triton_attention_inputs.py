"""The kernels of `attention_inputs`: a program processes some tokens of a row and some heads, as in `triton_rotary`.

Axes: R rows of a chunk, T tokens of a chunk, M tokens of a memory, K = M + T keys, H query heads, G key/value heads, E
head dimension, m parts of n rows that may lie apart in memory, O the width of all heads, 1 a broadcast axis.
"""

import torch
import triton
import triton.language as tl

from .layout import part_sizes, with_unit_stride
from .triton_layout import row_offset
from .triton_rotary import HEADS, launch_sizes, rotate_heads, row_and_token_strides


def extend_into(
    key_RGKE: torch.Tensor,
    value_RGKE: torch.Tensor,
    memory_key_RGME: torch.Tensor,
    memory_value_RGME: torch.Tensor,
    key_RGTE: torch.Tensor,
    value_RGTE: torch.Tensor,
    cos_R1TE: torch.Tensor,
    sin_R1TE: torch.Tensor,
) -> None:
    """Writes the memory and then the chunk, its keys rotated, to two contiguous tensors."""
    inputs = [with_unit_stride(one) for one in (memory_key_RGME, memory_value_RGME, key_RGTE, value_RGTE)]
    cos, sin = with_unit_stride(cos_R1TE), with_unit_stride(sin_R1TE)
    _, heads, num_keys, _ = key_RGKE.shape
    grid, token_blocks, sizes = launch_sizes(key_RGKE.shape)
    with torch.cuda.device_of(key_RGKE):
        _extend[grid](
            *inputs,
            cos,
            sin,
            key_RGKE,
            value_RGKE,
            heads,
            num_keys - key_RGTE.shape[2],
            num_keys,
            token_blocks,
            *[stride for one in inputs for stride in one.stride()[:3]],
            *row_and_token_strides(cos),
            *row_and_token_strides(sin),
            **sizes,
        )


def write_gradients(
    joint_mnO: torch.Tensor,
    first_row: int,
    of_query_RHTE: torch.Tensor | None,
    of_key_RGTE: torch.Tensor,
    of_value_RGTE: torch.Tensor,
    cos_R1TE: torch.Tensor,
    sin_R1TE: torch.Tensor,
) -> None:
    """Writes the gradients of the queries and keys before their rotation, and of the values, side by side for each
    token: those of row r to row `first_row` + r of the chunk, which has T rows of `joint_mnO`."""
    query = None if of_query_RHTE is None else with_unit_stride(of_query_RHTE)
    key, value = with_unit_stride(of_key_RGTE), with_unit_stride(of_value_RGTE)
    cos, sin = with_unit_stride(cos_R1TE), with_unit_stride(sin_R1TE)
    _, key_heads, width, _ = key.shape
    heads = 0 if query is None else query.shape[1]
    (row_blocks, key_blocks), token_blocks, constants = launch_sizes(key.shape)
    query_blocks = triton.cdiv(heads, HEADS)
    part_rows, part_stride = part_sizes(joint_mnO)
    assert part_rows % width == 0, "a part has whole rows of the chunk"
    with torch.cuda.device_of(key):
        _write_gradients[(row_blocks, query_blocks + 2 * key_blocks)](
            key if query is None else query,
            key,
            value,
            cos,
            sin,
            joint_mnO,
            first_row,
            part_rows // width,
            part_stride,
            heads,
            key_heads,
            width,
            token_blocks,
            query_blocks,
            key_blocks,
            *[stride for one in (key if query is None else query, key, value) for stride in one.stride()[:3]],
            *row_and_token_strides(cos),
            *row_and_token_strides(sin),
            **constants,
        )


@triton.jit
def _extend(
    memory_key,
    memory_value,
    key,
    value,
    cos,
    sin,
    key_output,
    value_output,
    heads,
    memory_width,
    num_keys,
    token_blocks,
    memory_key_row,
    memory_key_head,
    memory_key_token,
    memory_value_row,
    memory_value_head,
    memory_value_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // token_blocks).to(tl.int64)
    place = ((tl.program_id(0) % token_blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    is_memory = (place < memory_width) & (element < HALF)
    is_own = (place >= memory_width) & (place < num_keys) & (element < HALF)
    token = place - memory_width

    cos += row * cos_row + token * cos_token + element
    sin += row * sin_row + token * sin_token + element
    first_cos = tl.load(cos, mask=is_own, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + HALF, mask=is_own, other=0.0).to(tl.float32)
    first_sin = tl.load(sin, mask=is_own, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + HALF, mask=is_own, other=0.0).to(tl.float32)

    memory_key += row * memory_key_row + place * memory_key_token + element
    memory_value += row * memory_value_row + place * memory_value_token + element
    key += row * key_row + token * key_token + element
    value += row * value_row + token * value_token + element
    for number in range(HEADS):
        head = (tl.program_id(1) * HEADS + number).to(tl.int64)
        from_memory, from_own = is_memory & (head < heads), is_own & (head < heads)
        written = from_memory | from_own
        # A place is in the memory or in the chunk; loads from the other one are masked.
        first = tl.load(key + head * key_head, mask=from_own, other=0.0).to(tl.float32)
        second = tl.load(key + head * key_head + HALF, mask=from_own, other=0.0).to(tl.float32)
        rotated_first = first * first_cos + second * first_sin
        rotated_second = second * second_cos + first * second_sin
        past = memory_key + head * memory_key_head
        rotated_first += tl.load(past, mask=from_memory, other=0.0).to(tl.float32)
        rotated_second += tl.load(past + HALF, mask=from_memory, other=0.0).to(tl.float32)
        output = key_output + ((row * heads + head) * num_keys + place) * (2 * HALF) + element
        tl.store(output, rotated_first.to(output.dtype.element_ty), mask=written)
        tl.store(output + HALF, rotated_second.to(output.dtype.element_ty), mask=written)
        now, past = value + head * value_head, memory_value + head * memory_value_head
        first = tl.load(now, mask=from_own, other=0.0) + tl.load(past, mask=from_memory, other=0.0)
        second = tl.load(now + HALF, mask=from_own, other=0.0) + tl.load(past + HALF, mask=from_memory, other=0.0)
        output = value_output + ((row * heads + head) * num_keys + place) * (2 * HALF) + element
        tl.store(output, first, mask=written)
        tl.store(output + HALF, second, mask=written)


@triton.jit
def _write_gradients(
    query,
    key,
    value,
    cos,
    sin,
    joint,
    first_row,
    rows_per_part,
    part_stride,
    heads,
    key_heads,
    width,
    token_blocks,
    query_blocks,
    key_blocks,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // token_blocks).to(tl.int64)
    token = ((tl.program_id(0) % token_blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    element = tl.arange(0, BLOCK)[None, :]
    inside = (token < width) & (element < HALF)
    cos += row * cos_row + token * cos_token + element
    sin += row * sin_row + token * sin_token + element

    size: tl.constexpr = 2 * HALF
    token_stride = (heads + 2 * key_heads) * size
    joint += row_offset(tl.program_id(0) // token_blocks + first_row, rows_per_part, part_stride, width * token_stride)
    joint += token * token_stride + element
    query += row * query_row + token * query_token + element
    key += row * key_row + token * key_token + element
    value += row * value_row + token * value_token + element
    of_key, of_value = joint + heads * size, joint + (heads + key_heads) * size
    block = tl.program_id(1)
    if block < query_blocks:
        first_head = block * HEADS
        rotate_heads(query, query_head, joint, size, first_head, heads, cos, sin, inside, True, HEADS, HALF)
    elif block < query_blocks + key_blocks:
        first_head = (block - query_blocks) * HEADS
        rotate_heads(key, key_head, of_key, size, first_head, key_heads, cos, sin, inside, True, HEADS, HALF)
    else:
        first_head = (block - query_blocks - key_blocks) * HEADS
        _copy(value, value_head, of_value, first_head, key_heads, inside, HEADS, HALF)


@triton.jit
def _copy(tensor, tensor_head, output, first_head, heads, inside, HEADS: tl.constexpr, HALF: tl.constexpr):
    for number in range(HEADS):
        head = (first_head + number).to(tl.int64)
        exists = inside & (head < heads)
        source, place = tensor + head * tensor_head, output + head * (2 * HALF)
        tl.store(place, tl.load(source, mask=exists, other=0.0), mask=exists)
        tl.store(place + HALF, tl.load(source + HALF, mask=exists, other=0.0), mask=exists)
