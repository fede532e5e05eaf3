"""A decoder layer over [memory ; current segment]: equations 17-20 of the folded context condensation paper.

    X' = norm(X),  M' = norm(M)
    Q = X' W_Q,  K = [M' ; X'] W_K,  V = [M' ; X'] W_V
    Z = X + Attention(Q, K, V) W_O,  Y = Z + MLP(norm(Z))

X is the layer's input and Y its output for the current segment. The memory M is the layer's own output Y for the
segment before, its input X (`memory_source="layer_input"`), or X + a (Y - X) with a share a between them. M is
projected once, at the end of its chunk, and the next segment receives its keys and values; an input that passes its
gradient on has been projected already, as X'.
The parameters have a Llama's names, with the biases and norms of the checkpoint's family.

Axes: R rows of a chunk, T tokens of a chunk, K keys that the queries see, D hidden size, H query heads, G key/value
heads, E head dimension, F intermediate size, x any size, 1 a broadcast axis.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from .attention import AttentionMask, AttentionMetadata, attend
from .configuration import CondenseConfig
from .families import family_of
from .kernels.attention_inputs import attention_inputs, memory_of, takes_attention_kernels
from .kernels.layout import NEW, Places, Rows
from .kernels.rms_norm import add_rms_norm, input_and_rms_norm, takes_norm_kernel
from .kernels.rms_norm import rms_norm as fused_rms_norm
from .kernels.rotary import rotate
from .kernels.swiglu import silu_product
from .linear import apply_linear
from .memory import KeyValueState, Memory
from .segmentation import Chunk
from .shared_weights import collects_rows, used
from .transforms import has_hooks, is_plain


class RMSNorm(nn.Module):
    """A Llama's norm. On CUDA it is one kernel, which keeps only its input for the backward pass; in float32 without
    gradients it is one operation on a CPU, too."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.variance_epsilon}"

    def forward(self, hidden_RTD: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_RTD, used(self.weight), self.variance_epsilon)

    def after_input(self, hidden_RTD: torch.Tensor, places: Places = NEW) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input, whose further uses then add their gradients in the norm's kernel, and its norm."""
        if not is_plain(self, RMSNorm) or not takes_norm_kernel(hidden_RTD, self.weight):
            return hidden_RTD, self(hidden_RTD)
        return input_and_rms_norm(hidden_RTD, used(self.weight), self.variance_epsilon, places)

    def after_sum(
        self, hidden_RTD: torch.Tensor, residual_RTD: torch.Tensor, places: Places = NEW
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of two tensors, and its norm."""
        if not is_plain(self, RMSNorm) or not takes_norm_kernel(hidden_RTD, self.weight):
            sum_RTD = hidden_RTD + residual_RTD
            return sum_RTD, self(sum_RTD)
        return add_rms_norm(hidden_RTD, residual_RTD, used(self.weight), self.variance_epsilon, places)


def norm_of_input(norm: nn.Module, hidden_RTD: torch.Tensor, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input, for its further uses, and its norm. `norm` may be another module in its place, such as an
    adapter."""
    if hasattr(type(norm), "after_input"):
        return norm.after_input(hidden_RTD, places)  # type: ignore[operator]
    return hidden_RTD, norm(hidden_RTD)


def norm_of_sum(
    norm: nn.Module, hidden_RTD: torch.Tensor, residual_RTD: torch.Tensor, places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of two tensors, and its norm."""
    if hasattr(type(norm), "after_sum"):
        return norm.after_sum(hidden_RTD, residual_RTD, places)  # type: ignore[operator]
    sum_RTD = hidden_RTD + residual_RTD
    return sum_RTD, norm(sum_RTD)


def rms_norm(hidden_xD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    if takes_norm_kernel(hidden_xD, weight_D):
        return fused_rms_norm(hidden_xD, weight_D, epsilon)
    if is_one_operation(hidden_xD):
        return F.rms_norm(hidden_xD, weight_D.shape, weight_D, epsilon)
    return llama_rms_norm(hidden_xD, weight_D, epsilon)


def llama_rms_norm(hidden_xD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns weight * x / sqrt(mean(x^2) + epsilon) with a Llama's roundings: all but the weight in float32, or in
    float64 for a float64 model."""
    wide_xD = hidden_xD if hidden_xD.dtype == torch.float64 else hidden_xD.float()
    scale_x1 = torch.rsqrt(wide_xD.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide_xD * scale_x1).to(hidden_xD.dtype)


def is_one_operation(hidden_RTD: torch.Tensor) -> bool:
    """Returns whether `F.rms_norm` computes a norm."""
    return hidden_RTD.is_cuda or (hidden_RTD.dtype == torch.float32 and not torch.is_grad_enabled())


def project(input_RTD: torch.Tensor, *linears: nn.Module) -> list[torch.Tensor]:
    """Returns the outputs of linear maps of one input; maps of a stack share the gradient of the input."""
    joint = getattr(linears[0], "joint", None)
    return [apply_linear(one, input_RTD) for one in linears] if joint is None else joint(linears, input_RTD)


def rows_for(module: nn.Module, name: str, like_RTx: torch.Tensor, of_gradients: bool = False) -> Rows | None:
    """Returns the memory to write the input of a linear map of the module to, or the gradients of its outputs and of
    those with the same input. A stack may read these of several segments as one; None for new tensors."""
    if not collects_rows():
        return None
    rows = getattr(getattr(module, name, None), "rows", None)  # the module may be another in its place
    return None if rows is None else rows(like_RTx, of_gradients)


class MLP(nn.Module):
    """A Llama's gated feed-forward network."""

    def __init__(self, config: CondenseConfig):
        super().__init__()
        hidden_size, intermediate_size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.has_silu = config.hidden_act == "silu"

    def forward(self, hidden_RTD: torch.Tensor) -> torch.Tensor:
        gate_RTF, up_RTF = project(hidden_RTD, self.gate_proj, self.up_proj)
        if self.has_silu and not has_hooks(self.act_fn):
            rows = rows_for(self, "down_proj", gate_RTF)
            gradient_rows = rows_for(self, "gate_proj", gate_RTF, of_gradients=True)
            product_RTF = silu_product(gate_RTF, up_RTF, rows, gradient_rows)
        else:
            product_RTF = self.act_fn(gate_RTF) * up_RTF
        (output_RTD,) = project(product_RTF, self.down_proj)
        return output_RTD


class CondenseAttention(nn.Module):
    def __init__(self, config: CondenseConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        hidden_size, family = config.hidden_size, family_of(config)
        input_bias, output_bias = family.biases(config)
        self.q_proj = nn.Linear(hidden_size, config.num_attention_heads * self.head_dim, bias=input_bias)
        self.k_proj = nn.Linear(hidden_size, config.num_key_value_heads * self.head_dim, bias=input_bias)
        self.v_proj = nn.Linear(hidden_size, config.num_key_value_heads * self.head_dim, bias=input_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden_size, bias=output_bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if family.query_key_norms else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if family.query_key_norms else None

    def _heads(self, tensor_RTx: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        tensor_RxTE = tensor_RTx.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return tensor_RxTE if norm is None else norm(tensor_RxTE).to(tensor_RxTE.dtype)  # float32 under autocast

    def gradient_rows(self, name: str, normed_RTD: torch.Tensor) -> Rows | None:
        """Returns the memory for the gradients of projections; None if norms of the heads come between."""
        return rows_for(self, name, normed_RTD, of_gradients=True) if self.k_norm is None else None

    def project_memory(
        self, normed_RTD: torch.Tensor, metadata: AttentionMetadata, gradient_rows: Rows | None = None
    ) -> Memory:
        """Returns the keys and values of this chunk that the next segment sees."""
        key_RTx, value_RTx = project(normed_RTD, self.k_proj, self.v_proj)
        own, tables = (self._heads(key_RTx, self.k_norm), self._heads(value_RTx)), metadata.memory_rotary
        if takes_attention_kernels(None, *own, None, tables):
            return Memory(*memory_of(*own, tables, gradient_rows))
        # A view made after the rotation: its gradient comes first, and needs less memory.
        return Memory(rotate(own[0], tables), self._heads(value_RTx))

    def forward(
        self,
        normed_RTD: torch.Tensor,
        key_values: KeyValueState | None,
        metadata: AttentionMetadata,
        remembers_input: bool = False,
    ) -> tuple[torch.Tensor, Memory | None]:
        """Returns the output [R, T, D] and, with `remembers_input`, `normed_RTD`'s keys and values as next memory."""
        query_RTx, key_RTx, value_RTx = project(normed_RTD, self.q_proj, self.k_proj, self.v_proj)
        query_RHTE, value_RGTE = self._heads(query_RTx, self.q_norm), self._heads(value_RTx)
        key_RGTE = self._heads(key_RTx, self.k_norm)
        gradient_rows = self.gradient_rows("q_proj", normed_RTD)
        attended_RTx = self._attend(query_RHTE, key_RGTE, value_RGTE, key_values, metadata, gradient_rows)
        (output_RTD,) = project(attended_RTx, self.o_proj)
        if not remembers_input:
            return output_RTD, None
        return output_RTD, Memory(rotate(key_RGTE, metadata.memory_rotary), value_RGTE)

    def _attend(
        self,
        query_RHTE: torch.Tensor,
        key_RGTE: torch.Tensor,
        value_RGTE: torch.Tensor,
        key_values: KeyValueState | None,
        metadata: AttentionMetadata,
        gradient_rows: Rows | None,
    ) -> torch.Tensor:
        """Returns the heads' outputs [R, T, H * E]; queries and keys are not rotated yet."""
        own, groups = (query_RHTE, key_RGTE, value_RGTE), metadata.row_groups(key_values, query_RHTE.shape[0])
        if isinstance(key_values, Memory | None) and takes_attention_kernels(*own, key_values, metadata.rotary):
            parts = attention_inputs(*own, key_values, metadata.rotary, gradient_rows)
            outputs = [self._attention(*part, mask) for part, (_, mask, _) in zip(parts, groups, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        own = rotate(query_RHTE, metadata.rotary), rotate(key_RGTE, metadata.rotary), value_RGTE
        if len(groups) == 1:  # not a slice of all rows, whose gradient would be a copy
            _, mask, row_key_values = groups[0]
            return self._attend_rows(own, mask, row_key_values, metadata.chunk)
        sizes = [num_rows for num_rows, _, _ in groups]
        parts = list(zip(*(tensor.split(sizes) for tensor in own), strict=True))
        return torch.cat(
            [
                self._attend_rows(part, mask, row_key_values, metadata.chunk)
                for part, (_, mask, row_key_values) in zip(parts, groups, strict=True)
            ]
        )

    def _attend_rows(
        self, own: Sequence[torch.Tensor], mask: AttentionMask, key_values: KeyValueState | None, chunk: Chunk
    ) -> torch.Tensor:
        query_RHTE, key_RGTE, value_RGTE = own
        if key_values is not None:
            key_RGTE, value_RGTE = key_values.extend(key_RGTE, value_RGTE, chunk)
        return self._attention(query_RHTE, key_RGTE, value_RGTE, mask)

    def _attention(
        self, query_RHTE: torch.Tensor, key_RGKE: torch.Tensor, value_RGKE: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        dropout = self.config.attention_dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        return attend(implementation, query_RHTE, key_RGKE, value_RGKE, mask, self.scale, dropout)


class MemoryShare(nn.Module):
    """The remembered states of a segment: M = X + a (Y - X), of a layer's input X and output Y."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    @property
    def takes_input(self) -> bool:
        return self.share == 0

    @property
    def takes_output(self) -> bool:
        return self.share == 1

    def forward(self, input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        return blend(input_RTD, output_RTD, self.share)


def blend(input_RTD: torch.Tensor, output_RTD: torch.Tensor, share: float) -> torch.Tensor:
    """Returns X for a share of 0 and Y for a share of 1, unchanged."""
    if share in (0, 1):
        return output_RTD if share else input_RTD
    dtype = torch.promote_types(input_RTD.dtype, output_RTD.dtype)  # they differ for embeddings of another dtype
    return torch.lerp(input_RTD.to(dtype), output_RTD.to(dtype), share)


class LayerPlaces(NamedTuple):
    attention: Places = NEW  # of the input's norm
    mlp: Places = NEW  # of the norm after attention
    memory: Places = NEW  # of the norm of the output
    of_memory: Rows | None = None  # for the gradients of the memory's keys and values


class CondenseDecoderLayer(nn.Module):
    attention_evaluations = 1

    def __init__(self, config: CondenseConfig, layer_idx: int):
        super().__init__()
        self.memory_share = MemoryShare(config.memory_shares[layer_idx])
        self.self_attn = CondenseAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, input_RTD: torch.Tensor, key_values: KeyValueState | None, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, Memory | None]:
        """Returns the output [R, T, D] and, if `metadata.writes_memory`, the keys and values for the next segment."""
        # An undetached memory of the input reuses this segment's keys and values, rotated differently.
        takes_input = self.memory_share.takes_input or metadata.is_sink
        from_input = metadata.writes_memory and takes_input and not any(metadata.detach_R)
        places = self._places(input_RTD)
        input_RTD, normed_RTD = norm_of_input(self.input_layernorm, input_RTD, places.attention)
        attention_RTD, memory = self.self_attn(normed_RTD, key_values, metadata, remembers_input=from_input)
        residual_RTD, normed_RTD = norm_of_sum(self.post_attention_layernorm, attention_RTD, input_RTD, places.mlp)
        from_output = self.memory_share.takes_output and not has_hooks(self.memory_share)
        if metadata.writes_memory and from_output and not from_input and not any(metadata.detach_R):
            output_RTD, normed_RTD = norm_of_sum(
                self.input_layernorm, self.mlp(normed_RTD), residual_RTD, places.memory
            )
            return output_RTD, self.self_attn.project_memory(normed_RTD, metadata, places.of_memory)
        output_RTD = residual_RTD + self.mlp(normed_RTD)
        if from_input or not metadata.writes_memory:
            return output_RTD, memory
        source_RTD = detach_rows(self.memory_share(input_RTD, output_RTD), metadata.detach_R)
        return output_RTD, self.project_memory(source_RTD, metadata, places)

    def _places(self, input_RTD: torch.Tensor) -> LayerPlaces:
        """Returns the places of the norms' results, which the linear maps beside the norms read; asked for in every
        call, because they depend on the number of calls."""
        if not collects_rows():
            return LayerPlaces()
        attention, mlp = self.self_attn, self.mlp
        # A layer that remembers its input makes a memory of its own for detached segments only, and rows of segments
        # that are not consecutive would be reused too early.
        remembers_input = 0 in attention.config.memory_shares
        return LayerPlaces(
            Places(rows_for(attention, "q_proj", input_RTD)),
            Places(rows_for(mlp, "gate_proj", input_RTD), rows_for(attention, "o_proj", input_RTD, of_gradients=True)),
            Places(rows_for(attention, "k_proj", input_RTD), rows_for(mlp, "down_proj", input_RTD, of_gradients=True)),
            None if remembers_input else attention.gradient_rows("k_proj", input_RTD),
        )

    def project_memory(
        self, source_RTD: torch.Tensor, metadata: AttentionMetadata, places: LayerPlaces | None = None
    ) -> Memory:
        """Returns the keys and values, of this chunk's hidden states [R, T, D], that the next segment sees."""
        normed, of_memory = (places.memory.normed, places.of_memory) if places else (None, None)
        _, normed_RTD = norm_of_input(self.input_layernorm, source_RTD, Places(normed))
        return self.self_attn.project_memory(normed_RTD, metadata, of_memory)


def detach_rows(source_RTD: torch.Tensor, detach_R: tuple[bool, ...]) -> torch.Tensor:
    """Stops the gradient through the memory of some rows (truncated backpropagation, `bptt_segments`)."""
    if all(detach_R):
        return source_RTD.detach()
    if not any(detach_R):
        return source_RTD
    runs = [(detach, len(list(run))) for detach, run in groupby(detach_R)]
    parts = source_RTD.split([rows for _, rows in runs])
    return torch.cat([part.detach() if detach else part for part, (detach, _) in zip(parts, runs, strict=True)])
