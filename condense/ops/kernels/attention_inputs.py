"""The inputs of attention, from the projections of a chunk: rotated queries, and keys and values after a memory's.

One kernel writes [memory ; chunk] of keys and values, and rotates the chunk's keys on the way. In the backward pass one
kernel writes the gradients of all projections side by side, like the weights that they come from: a single product
leads to the layer's input. The plain form is `rotate`, and a concatenation of keys and one of values.

Axes: R rows of a chunk, H query heads, G key/value heads, M tokens of the memory, T tokens of the chunk, K = M + T
keys, E head dimension, m parts of n rows that may lie apart in memory, O the width of all projections, 1 a broadcast
axis.
"""

import torch

from .availability import uses_kernels
from .layout import given_or_new
from .rotary import RotaryTables, gradient_of_rotated, is_token_major, takes_rotary_kernel

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
AttentionInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values


def takes_attention_kernels(
    query_RHTE: torch.Tensor | None,
    key_RGTE: torch.Tensor,
    value_RGTE: torch.Tensor,
    memory: KeysAndValues | None,
    tables: RotaryTables,
) -> bool:
    """Returns whether the kernels take the inputs: queries, keys and values have heads of one size, and a memory has
    the chunk's heads. `query_RHTE` is None for `memory_of`."""

    if not takes_rotary_kernel(key_RGTE, tables) or key_RGTE.shape != value_RGTE.shape:
        return False

    def kind(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, tensor.device, tensor.shape[-1]

    others = [one for one in (query_RHTE, value_RGTE, *(memory or ())) if one is not None]
    if not all(one.dim() == 4 and kind(one) == kind(key_RGTE) and uses_kernels(one) for one in others):
        return False
    return memory is None or (memory[0].shape == memory[1].shape and memory[0].shape[1] == key_RGTE.shape[1])


def attention_inputs(
    query_RHTE: torch.Tensor,
    key_RGTE: torch.Tensor,
    value_RGTE: torch.Tensor,
    memory: KeysAndValues | None,
    tables: RotaryTables,
    of_own_mnO: torch.Tensor | None = None,
) -> list[AttentionInputs]:
    """Returns rotated queries, and keys and values [R, G, K, E]; `takes_attention_kernels` must hold.

    A memory of fewer rows belongs to the first ones. Then the result has two parts: rows with a memory, and without.
    The gradients of the projections are written to `of_own_mnO` if it is given.
    """
    found = _Inputs.apply(query_RHTE, key_RGTE, value_RGTE, *(memory or (None, None)), *tables, of_own_mnO)
    return [found[first : first + 3] for first in range(0, len(found), 3)]


def memory_of(
    key_RGTE: torch.Tensor, value_RGTE: torch.Tensor, tables: RotaryTables, of_own_mnO: torch.Tensor | None = None
) -> KeysAndValues:
    """Returns rotated keys, and the values; `takes_attention_kernels` must hold, without queries."""
    _, key_RGTE, value_RGTE = _Inputs.apply(None, key_RGTE, value_RGTE, None, None, *tables, of_own_mnO)
    return key_RGTE, value_RGTE


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query_RHTE, key_RGTE, value_RGTE, memory_key_RGME, memory_value_RGME, cos_R1TE, sin_R1TE, of_own_mnO
    ):
        ctx.save_for_backward(cos_R1TE, sin_R1TE)
        ctx.query_heads = 0 if query_RHTE is None else query_RHTE.shape[1]
        ctx.by_token, ctx.of_own_mnO = is_token_major(key_RGTE), of_own_mnO
        num_rows = len(key_RGTE)
        num_with = 0 if memory_key_RGME is None else len(memory_key_RGME)
        ctx.memory_width = memory_key_RGME.shape[2] if num_with else 0
        ctx.parts = [part for part in (slice(0, num_with), slice(num_with, num_rows)) if part.stop > part.start]
        query_RHTE = None if query_RHTE is None else _rotate(query_RHTE, (cos_R1TE, sin_R1TE))
        outputs: list[torch.Tensor | None] = []
        for part in ctx.parts:
            outputs.append(query_RHTE if query_RHTE is None or len(ctx.parts) == 1 else query_RHTE[part])
            key, value, tables = key_RGTE[part], value_RGTE[part], _of_part((cos_R1TE, sin_R1TE), part)
            if part.start < num_with:
                outputs += _extend((memory_key_RGME, memory_value_RGME), key, value, tables)
            else:
                outputs += [_rotate(key, tables), value]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        """Gradients of gradients are differentiable; then each is a tensor of its own."""
        triples = [gradients[first : first + 3] for first in range(0, len(gradients), 3)]
        of_memory: tuple[torch.Tensor | None, ...] = None, None
        if ctx.memory_width:  # of the first part
            of_query, *of_both = triples[0]
            of_memory, of_own = zip(*(one.tensor_split([ctx.memory_width], dim=2) for one in of_both), strict=True)
            triples[0] = of_query, *of_own
        write = _differentiable if torch.is_grad_enabled() else _new_views
        return *write(ctx, triples, ctx.saved_tensors), *of_memory, None, None, None


def _rotate(tensor_RHTE: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    from .triton_rotary import rotate_into

    output_RHTE = torch.empty_like(tensor_RHTE, memory_format=torch.contiguous_format)
    rotate_into(output_RHTE, tensor_RHTE, *tables, inverse=False)
    return output_RHTE


def _extend(
    memory: KeysAndValues, key_RGTE: torch.Tensor, value_RGTE: torch.Tensor, tables: RotaryTables
) -> KeysAndValues:
    from .triton_attention_inputs import extend_into

    num_rows, heads, width, size = key_RGTE.shape
    shape = num_rows, heads, memory[0].shape[2] + width, size
    key_RGKE, value_RGKE = key_RGTE.new_empty(shape), value_RGTE.new_empty(shape)
    extend_into(key_RGKE, value_RGKE, *memory, key_RGTE, value_RGTE, *tables)
    return key_RGKE, value_RGKE


def _of_part(tables: RotaryTables, part: slice) -> RotaryTables:
    cos_R1TE, sin_R1TE = tables
    return cos_R1TE if len(cos_R1TE) == 1 else cos_R1TE[part], sin_R1TE if len(sin_R1TE) == 1 else sin_R1TE[part]


def _differentiable(ctx, triples, tables: RotaryTables) -> list[torch.Tensor | None]:
    columns = []
    for (of_query, of_key, of_value), part in zip(triples, ctx.parts, strict=True):
        settings = _of_part(tables, part), ctx.by_token
        of_query = gradient_of_rotated(of_query, *settings) if ctx.query_heads else None
        columns.append((of_query, gradient_of_rotated(of_key, *settings), of_value))
    return [None if parts[0] is None else torch.cat(parts) for parts in zip(*columns, strict=True)]


def _new_views(ctx, triples, tables: RotaryTables) -> list[torch.Tensor | None]:
    """Returns views of one tensor [m, n, O], which a kernel writes."""
    from .triton_attention_inputs import write_gradients

    like = triples[0][1]
    key_heads, width, size = like.shape[1:]
    num_rows, heads = ctx.parts[-1].stop, (ctx.query_heads, key_heads, key_heads)
    joint_mnO = given_or_new(ctx.of_own_mnO, num_rows * width, sum(heads) * size, like)
    for (of_query, of_key, of_value), part in zip(triples, ctx.parts, strict=True):
        write_gradients(joint_mnO, part.start, of_query, of_key, of_value, *_of_part(tables, part))
    by_head = joint_mnO.view(num_rows, width, sum(heads), size).split(heads, dim=2)
    of_query, of_key, of_value = (one.transpose(1, 2) for one in by_head)
    return [of_query if ctx.query_heads else None, of_key, of_value]
