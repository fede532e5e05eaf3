"""A forward pass over m consecutive layers at once, each on a segment of its own: the equations of `condense.layers`.

The rows of a band lie layer after layer, and each operation has the layers' weights as a stack [m, ...]. The sums of
the weights' gradients, and the memory that kernels write to in a captured group, are arguments.

Axes: R rows of a band (layer after layer), T tokens of a chunk, D hidden size, m layers of the band, n rows and tokens
of a layer together, H query heads, G key/value heads, E head dimension, F intermediate size, I and O input and output
widths, p parts of a sum, x any size.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from ..attention import AttentionMask, attend
from ..layers import blend, detach_rows
from ..ops.kernels.attention_inputs import AttentionInputs, attention_inputs, memory_of, takes_attention_kernels
from ..ops.kernels.availability import uses_kernels
from ..ops.kernels.rms_norm import add_rms_norm, input_and_rms_norm, num_parts, takes_norm_kernel
from ..ops.kernels.rotary import RotaryTables, rotate
from ..ops.kernels.swiglu import silu_product
from ..ops.linear import linear
from ..ops.products import stacked_products
from ..ops.shared_weights import Begun, product_dtype, use_weight, used_part
from ..ops.transforms import join
from ..segmentation import Chunk
from ..state.memory import Memory
from .group_buffers import GroupBuffers
from .stacked_products import add_products, summed_products
from .stacking import Stack

QUERY, KEY, VALUE, OUTPUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))


class Band(NamedTuple):
    """Some consecutive layers of a stack, the lowest of which is at segment `newest`.

    `sums` are those of weights by name; autograd adds the gradients of others. `buffers` are those of a captured group.
    """

    stack: Stack
    layers: slice
    newest: int
    sums: Mapping[str, Begun]
    buffers: GroupBuffers | None = None

    @property
    def size(self) -> int:
        return self.layers.stop - self.layers.start

    def part(self, name: str) -> torch.Tensor:
        """Returns the layers' weights as a stack [m, ...], for a use that adds to their sum itself, if there is one."""
        parameter = self.stack.parameters[name]
        return parameter.leaf(self.layers) if self.buffers and name in self.sums else parameter.part(self.layers)

    def weight(self, name: str) -> torch.Tensor:
        """Returns the layers' weights as a stack [m, ...], for any use."""
        parameter = self.stack.parameters[name]
        if parameter.tensor_Mx is None:
            return join([use_weight(one)[None] for one in parameter.all[self.layers]])
        return used_part(self.part(name), self.sums[name], self.layers) if name in self.sums else self.part(name)

    def workspace(
        self, name: str, like_RTx: torch.Tensor, width: int | None = None, of_gradients: bool = False
    ) -> torch.Tensor | None:
        """Returns the workspace [m, n, width] for the input of a linear map and of those beside it, or for the
        gradients of their outputs; None for new tensors."""
        if self.buffers is None or not uses_kernels(like_RTx):
            return None
        width = like_RTx.shape[-1] if width is None else width
        return self.buffers.workspace(f"{name}.weight", self.layers, self.newest, width, like_RTx, of_gradients)


class BandMetadata(NamedTuple):
    """The data about a band's segments, with rows [layer, row]. `masks` are those of the rows with a memory, which come
    first, and of the rows without one."""

    chunk: Chunk  # of the newest segment
    rotary: RotaryTables
    memory_rotary: RotaryTables
    masks: Sequence[AttentionMask]
    writes_memory: bool
    detach_R: tuple[bool, ...]
    sink: Memory | None


def run_band(
    band: Band, hidden_RTD: torch.Tensor, memory: Memory | None, metadata: BandMetadata
) -> tuple[torch.Tensor, Memory | None]:
    """Returns the output [R, T, D] and, if `metadata.writes_memory`, the keys and values for the next segments."""
    shares = [layer.memory_share.share for layer in band.stack.layers[band.layers]]
    writes, is_detached = metadata.writes_memory, any(metadata.detach_R)
    from_input = writes and set(shares) == {0} and not is_detached
    from_output = writes and set(shares) == {1} and not is_detached
    input_RTD, normed_RTD = _norm(band, "input_layernorm", hidden_RTD, before=QUERY)
    attention_RTD, written = _attention(band, normed_RTD, memory, metadata, from_input)
    residual_RTD, normed_RTD = _add_and_norm(
        band, "post_attention_layernorm", attention_RTD, input_RTD, after=OUTPUT, before=GATE
    )
    update_RTD = _mlp(band, normed_RTD)
    if from_output:
        output_RTD, normed_RTD = _add_and_norm(
            band, "input_layernorm", update_RTD, residual_RTD, after=DOWN, before=KEY
        )
        written = _memory(band, normed_RTD, metadata)
    else:
        output_RTD = residual_RTD + update_RTD
    if writes and not (from_input or from_output):
        source_RTD = detach_rows(_blend(shares, input_RTD, output_RTD), metadata.detach_R)
        _, normed_RTD = _norm(band, "input_layernorm", source_RTD, before=KEY)
        written = _memory(band, normed_RTD, metadata)
    return output_RTD, written and written.with_sink(metadata.sink, metadata.chunk)


def _attention(
    band: Band, normed_RTD: torch.Tensor, memory: Memory | None, metadata: BandMetadata, remembers_input: bool
) -> tuple[torch.Tensor, Memory | None]:
    """Returns the output [R, T, D] and, with `remembers_input`, the input's keys and values as next memory."""
    query_RTx, key_RTx, value_RTx = _products(band, (QUERY, KEY, VALUE), normed_RTD)
    query_RHTE, value_RGTE = _heads(band, query_RTx, "self_attn.q_norm"), _heads(band, value_RTx)
    key_RGTE = _heads(band, key_RTx, "self_attn.k_norm")
    attended_RTx = _attend(band, (query_RHTE, key_RGTE, value_RGTE), memory, metadata)
    (output_RTD,) = _products(band, (OUTPUT,), attended_RTx)
    if not remembers_input:
        return output_RTD, None
    return output_RTD, Memory(rotate(key_RGTE, metadata.memory_rotary), value_RGTE)


def _attend(band: Band, own: AttentionInputs, memory: Memory | None, metadata: BandMetadata) -> torch.Tensor:
    """Returns the heads' outputs [R, T, H * E]; queries and keys are not rotated yet."""
    if takes_attention_kernels(*own, memory, metadata.rotary):
        parts = attention_inputs(*own, memory, metadata.rotary, _gradients_of_heads(band, QUERY, *own))
    else:
        parts = _plain_inputs(own, memory, metadata)
    attention = band.stack.layers[0].self_attn
    config, scale = attention.config, attention.scale
    dropout = config.attention_dropout if attention.training else 0.0
    outputs = [
        attend(config._attn_implementation, *part, mask, scale, dropout)
        for part, mask in zip(parts, metadata.masks, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _plain_inputs(own: AttentionInputs, memory: Memory | None, metadata: BandMetadata) -> list[AttentionInputs]:
    """Works as `attention_inputs`."""
    query_RHTE, key_RGTE, value_RGTE = own
    own = rotate(query_RHTE, metadata.rotary), rotate(key_RGTE, metadata.rotary), value_RGTE
    parts = [own]
    if memory is not None and len(memory.key_RGKE) < len(query_RHTE):
        sizes = [len(memory.key_RGKE), len(query_RHTE) - len(memory.key_RGKE)]
        parts = list(zip(*(one.split(sizes) for one in own), strict=True))
    if memory is not None:
        query_RHTE, key_RGTE, value_RGTE = parts[0]
        parts[0] = query_RHTE, *memory.extend(key_RGTE, value_RGTE, metadata.chunk)
    return parts


def _mlp(band: Band, normed_RTD: torch.Tensor) -> torch.Tensor:
    mlp = band.stack.layers[0].mlp
    gate_RTF, up_RTF = _products(band, (GATE, UP), normed_RTD)
    if mlp.has_silu:
        of_both_mnx = band.workspace(GATE, gate_RTF, 2 * gate_RTF.shape[-1], of_gradients=True)
        product_RTF = silu_product(gate_RTF, up_RTF, band.workspace(DOWN, gate_RTF), of_both_mnx)
    else:
        product_RTF = mlp.act_fn(gate_RTF) * up_RTF
    (output_RTD,) = _products(band, (DOWN,), product_RTF)
    return output_RTD


def _memory(band: Band, normed_RTD: torch.Tensor, metadata: BandMetadata) -> Memory:
    """Returns the keys and values that the next segments see."""
    key_RTx, value_RTx = _products(band, (KEY, VALUE), normed_RTD)
    own, tables = (_heads(band, key_RTx, "self_attn.k_norm"), _heads(band, value_RTx)), metadata.memory_rotary
    if takes_attention_kernels(None, *own, None, tables):
        # A layer that remembers its input makes a memory of its own for detached segments only, and rows of segments
        # that are not consecutive would be reused too early.
        is_consecutive = all(layer.memory_share.share for layer in band.stack.layers)
        rows = _gradients_of_heads(band, KEY, *own) if is_consecutive else None
        return Memory(*memory_of(*own, tables, rows))
    # A view made after the rotation: its gradient comes first, and needs less memory.
    return Memory(rotate(own[0], tables), _heads(band, value_RTx))


def _blend(shares: Sequence[float], input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
    """Returns what the layers remember; consecutive layers of equal shares are blended together."""
    num_rows = len(input_RTD) // len(shares)
    runs = [(share, len(list(run)) * num_rows) for share, run in groupby(shares)]
    if len(runs) == 1:
        return blend(input_RTD, output_RTD, shares[0])
    parts = (tensor.split([rows for _, rows in runs]) for tensor in (input_RTD, output_RTD))
    return torch.cat([blend(inputs, outputs, share) for inputs, outputs, (share, _) in zip(*parts, runs, strict=True)])


def _heads(band: Band, tensor_RTx: torch.Tensor, norm: str = "") -> torch.Tensor:
    size = band.stack.layers[0].self_attn.head_dim
    tensor_RxTE = tensor_RTx.unflatten(-1, (-1, size)).transpose(1, 2)
    if f"{norm}.weight" not in band.stack.parameters:  # heads have norms in some families
        return tensor_RxTE
    return _norm(band, norm, tensor_RxTE)[1].to(tensor_RxTE.dtype)  # float32 under autocast


def _gradients_of_heads(band: Band, name: str, *heads: torch.Tensor) -> torch.Tensor | None:
    """Returns the memory for the gradients of projections; None if norms of the heads come between."""
    if "self_attn.k_norm.weight" in band.stack.parameters:
        return None
    return band.workspace(name, heads[0], sum(one.shape[1] * one.shape[3] for one in heads), of_gradients=True)


def _norm(
    band: Band, name: str, hidden_RxD: torch.Tensor, before: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input for its further uses, and its norm; `before` is the first linear map that reads the norm."""
    return input_and_rms_norm(hidden_RxD, *_norm_arguments(band, name, hidden_RxD, None, before))


def _add_and_norm(
    band: Band, name: str, update_RTD: torch.Tensor, residual_RTD: torch.Tensor, after: str, before: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of an update and the residual stream, and its norm; `after` is the linear map whose output the
    update is, `before` the first that reads the norm."""
    return add_rms_norm(update_RTD, residual_RTD, *_norm_arguments(band, name, update_RTD, after, before))


def _norm_arguments(
    band: Band, name: str, hidden_RxD: torch.Tensor, after: str | None, before: str | None
) -> tuple[torch.Tensor, float, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns the weights, epsilon and workspaces of a norm's kernel."""
    epsilon, weight = band.stack.layers[0].get_submodule(name).variance_epsilon, f"{name}.weight"
    width, of_weight_mpD = hidden_RxD.shape[-1], None
    if band.buffers is not None and takes_norm_kernel(hidden_RxD, band.stack.parameters[weight].all[0]):
        rows = hidden_RxD.numel() // width // band.size
        of_weight_mpD = band.buffers.parts(weight, band.layers, num_parts(rows, width), hidden_RxD)
    return (
        band.weight(weight) if of_weight_mpD is None else band.part(weight),
        epsilon,
        None if before is None else band.workspace(before, hidden_RxD),
        None if after is None else band.workspace(after, hidden_RxD, of_gradients=True),
        of_weight_mpD,
    )


def _products(band: Band, names: Sequence[str], input_RTI: torch.Tensor) -> list[torch.Tensor]:
    """Returns the outputs [R, T, O] of linear maps of one input: a batched product for each, or one for all if their
    weights lie side by side."""
    weights = [f"{name}.weight" for name in names]
    parameters = [band.stack.parameters[weight] for weight in weights]
    if any(parameter.tensor_Mx is None for parameter in parameters):
        return [_one_by_one(band, name, input_RTI) for name in names]
    input_mnI = input_RTI.reshape(band.size, -1, input_RTI.shape[-1])
    firsts = [parameter.all[0] for parameter in parameters]
    casts = any(not input_RTI.dtype == one.dtype == product_dtype(input_RTI, one) for one in firsts)
    outputs: Sequence[torch.Tensor]
    if not torch.is_grad_enabled():
        outputs = stacked_products(input_mnI, [band.part(weight) for weight in weights])
    elif casts or not any(weight in band.sums for weight in weights):
        outputs = [torch.bmm(input_mnI, band.weight(weight).transpose(1, 2)) for weight in weights]
    else:
        sums, tokens = zip(*(band.sums.get(weight, (None, None)) for weight in weights), strict=True)
        add = partial(add_products, sums, band.layers)
        if band.buffers is not None:
            add = partial(band.buffers.add_products, weights, band.layers)
        outputs = summed_products(add, input_mnI, [band.part(weight) for weight in weights], tokens)
    return [_with_bias(band, name, output_mnO, input_RTI) for name, output_mnO in zip(names, outputs, strict=True)]


def _with_bias(band: Band, name: str, output_mnO: torch.Tensor, input_RTI: torch.Tensor) -> torch.Tensor:
    if f"{name}.bias" in band.stack.parameters:
        output_mnO = output_mnO + band.weight(f"{name}.bias")[:, None].to(output_mnO.dtype)  # differ under autocast
    return output_mnO.view(*input_RTI.shape[:2], -1)


def _one_by_one(band: Band, name: str, input_RTI: torch.Tensor) -> torch.Tensor:
    """Returns the output of a linear map whose weights are apart."""
    modules = [layer.get_submodule(name) for layer in band.stack.layers[band.layers]]
    parts = input_RTI.unflatten(0, (len(modules), -1))
    return torch.cat([linear(part, one.weight, one.bias) for one, part in zip(modules, parts, strict=True)])
