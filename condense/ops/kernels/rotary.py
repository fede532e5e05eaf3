"""Rotary position embedding.

The tables come from `rotary_tables` in `condense.attention.metadata`, with the sign of sin's first half changed: a
rotated vector is x cos + roll(x) sin, and roll exchanges the halves. The gradient is g cos + roll(g sin).

Axes: R rows of a chunk, T tokens of a chunk, H heads, E head dimension, 1 a broadcast axis.
"""

import torch

from .availability import uses_kernels

RotaryTables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [R or 1, 1, T, E]


def rotate(tensor_RHTE: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Applies rotary position embedding to queries or keys; a kernel writes the result in the order of its axes."""
    if takes_rotary_kernel(tensor_RHTE, tables):
        return _Rotation.apply(tensor_RHTE, *tables, False, False)
    return plain_rotate(tensor_RHTE, tables)


def plain_rotate(tensor_RHTE: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    cos_R1TE, sin_R1TE = tables
    rolled_RHTE = tensor_RHTE.roll(tensor_RHTE.shape[-1] // 2, dims=-1)
    # Under autocast the tables are float32 and projections are not: keys must keep the dtype of values.
    return (tensor_RHTE * cos_R1TE + rolled_RHTE * sin_R1TE).to(tensor_RHTE.dtype)


def takes_rotary_kernel(tensor_RHTE: torch.Tensor, tables: RotaryTables) -> bool:
    if tensor_RHTE.dim() != 4 or tensor_RHTE.shape[-1] % 2 or not uses_kernels(tensor_RHTE):
        return False
    num_rows, _, width, size = tensor_RHTE.shape
    shapes = (1, 1, width, size), (num_rows, 1, width, size)
    return all(
        uses_kernels(table) and table.device == tensor_RHTE.device and table.shape in shapes and not table.requires_grad
        for table in tables
    )


class _Rotation(torch.autograd.Function):
    """Returns the rotation or, with `inverse`, its gradient. The result has its axes in order. With `by_token` it is a
    view of [R, T, H, E], as projections are, so that their gradient needs no copy."""

    @staticmethod
    def forward(ctx, tensor_RHTE, cos_R1TE, sin_R1TE, inverse, by_token):
        from .triton_rotary import rotate_into

        ctx.save_for_backward(cos_R1TE, sin_R1TE)
        ctx.inverse, ctx.by_token = inverse, is_token_major(tensor_RHTE)
        num_rows, heads, width, size = tensor_RHTE.shape
        if by_token:
            output_RHTE = tensor_RHTE.new_empty(num_rows, width, heads, size).transpose(1, 2)
        else:
            output_RHTE = tensor_RHTE.new_empty(num_rows, heads, width, size)
        rotate_into(output_RHTE, tensor_RHTE, cos_R1TE, sin_R1TE, inverse)
        return output_RHTE

    @staticmethod
    def backward(ctx, gradient_RHTE):
        # Linear in the tensor: the gradient of the gradient is the rotation again.
        return _Rotation.apply(gradient_RHTE, *ctx.saved_tensors, not ctx.inverse, ctx.by_token), *[None] * 4


def gradient_of_rotated(gradient_RHTE: torch.Tensor, tables: RotaryTables, by_token: bool) -> torch.Tensor:
    """Returns the gradient of a tensor before its rotation; `by_token`: its memory has tokens before heads."""
    return _Rotation.apply(gradient_RHTE, *tables, True, by_token)


def is_token_major(tensor_RHTE: torch.Tensor) -> bool:
    return tensor_RHTE.stride(1) < tensor_RHTE.stride(2)
