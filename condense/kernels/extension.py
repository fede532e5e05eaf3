"""The keys and values of a chunk after those of its memory, by one kernel that rotates the chunk's keys on the way.

The plain form is `rotate`, and a concatenation of the keys and one of the values.

Axes: R rows of a chunk, G key/value heads, M tokens of the memory, T tokens of the chunk, K = M + T keys, E head
dimension, 1 a broadcast axis.
"""

import torch

from .availability import uses_kernels
from .rotary import gradient_of_rotated, is_by_token, rotate, takes_rotary_kernel

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def takes_extension_kernel(
    memory: KeysAndValues,
    key_RGTE: torch.Tensor,
    value_RGTE: torch.Tensor,
    cos_R1TE: torch.Tensor,
    sin_R1TE: torch.Tensor,
) -> bool:
    def kind(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.device, *tensor.shape[1::2]  # heads and their dimension

    others = *memory, value_RGTE
    alike = all(kind(one) == kind(key_RGTE) and uses_kernels(one) for one in others)
    shapes = memory[0].shape == memory[1].shape and key_RGTE.shape == value_RGTE.shape
    return alike and shapes and takes_rotary_kernel(key_RGTE, (cos_R1TE, sin_R1TE))


def extend_rotated(
    memory: KeysAndValues | None,
    key_RGTE: torch.Tensor,
    value_RGTE: torch.Tensor,
    cos_R1TE: torch.Tensor,
    sin_R1TE: torch.Tensor,
) -> KeysAndValues:
    """Returns [memory ; rotated chunk] of the keys and [memory ; chunk] of the values, [R, G, K, E].

    `takes_extension_kernel` must hold for the inputs, or for inputs that these are rows of.
    """
    if memory is None:
        return rotate(key_RGTE, (cos_R1TE, sin_R1TE)), value_RGTE
    assert len(memory[0]) == len(key_RGTE)
    return _Extension.apply(*memory, key_RGTE, value_RGTE, cos_R1TE, sin_R1TE)


class _Extension(torch.autograd.Function):
    @staticmethod
    def forward(ctx, memory_key_RGME, memory_value_RGME, key_RGTE, value_RGTE, cos_R1TE, sin_R1TE):
        from .triton_rotary import extend_into

        ctx.save_for_backward(cos_R1TE, sin_R1TE)
        ctx.set_materialize_grads(False)  # one of the results may be unused
        ctx.memory_width, ctx.by_token = memory_key_RGME.shape[2], is_by_token(key_RGTE)
        num_rows, heads, width, size = key_RGTE.shape
        shape = num_rows, heads, ctx.memory_width + width, size
        key_RGKE, value_RGKE = key_RGTE.new_empty(shape), value_RGTE.new_empty(shape)
        tables = cos_R1TE, sin_R1TE
        extend_into(key_RGKE, value_RGKE, memory_key_RGME, memory_value_RGME, key_RGTE, value_RGTE, *tables)
        return key_RGKE, value_RGKE

    @staticmethod
    def backward(ctx, of_key_RGKE, of_value_RGKE):
        of_memory_key = of_memory_value = of_key = of_value = None
        if of_key_RGKE is not None:
            of_memory_key, of_rotated = of_key_RGKE.tensor_split([ctx.memory_width], dim=2)
            of_key = gradient_of_rotated(of_rotated, ctx.saved_tensors, ctx.by_token)
        if of_value_RGKE is not None:
            of_memory_value, of_value = of_value_RGKE.tensor_split([ctx.memory_width], dim=2)
        return of_memory_key, of_memory_value, of_key, of_value, None, None
