"""A decoder layer over [memory ; current segment]: equations 17-20 of the folded context condensation paper.

    X' = norm(X),  M' = norm(M)
    Q = X' W_Q,  K = [M' ; X'] W_K,  V = [M' ; X'] W_V
    Z = X + Attention(Q, K, V) W_O,  Y = Z + MLP(norm(Z))

X is the layer's input and Y its output for the current segment. The memory M is the layer's own output Y for the
segment before, its input X (`memory_source="layer_input"`), or X + a (Y - X) with a share a between them. M is
projected once, at the end of its chunk, and the next segment receives its keys and values. The model may put a sink's
in place of the first. An input that passes its gradient on needs no second projection: it has been projected as X'.
The parameters have a Llama's names, with the biases and norms of the checkpoint's family. Bands of layers compute the
same equations (`execution.band`).

Axes: R rows of a chunk, T tokens of a chunk, K keys that the queries see, D hidden size, H query heads, G key/value
heads, E head dimension, F intermediate size, x any size.
"""

from itertools import groupby

import torch
from torch import nn
from transformers.activations import ACT2FN

from .attention import AttentionMetadata, attend
from .configuration import CondenseConfig
from .families import family_of
from .ops.kernels.rms_norm import rms_norm
from .ops.kernels.rotary import rotate
from .ops.kernels.swiglu import silu_product
from .ops.linear import apply_linear
from .ops.shared_weights import use_weight
from .ops.transforms import has_hooks
from .state.memory import KeyValueState, Memory


class RMSNorm(nn.Module):
    """A Llama's norm."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.variance_epsilon}"

    def forward(self, hidden_RTD: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_RTD, use_weight(self.weight), self.variance_epsilon)


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
        gate_RTF, up_RTF = apply_linear(self.gate_proj, hidden_RTD), apply_linear(self.up_proj, hidden_RTD)
        is_silu = self.has_silu and not has_hooks(self.act_fn)
        product_RTF = silu_product(gate_RTF, up_RTF) if is_silu else self.act_fn(gate_RTF) * up_RTF
        return apply_linear(self.down_proj, product_RTF)


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

    def forward(
        self,
        normed_RTD: torch.Tensor,
        key_values: KeyValueState | None,
        metadata: AttentionMetadata,
        remembers_input: bool = False,
    ) -> tuple[torch.Tensor, Memory | None]:
        """Returns the output [R, T, D] and, with `remembers_input`, `normed_RTD`'s keys and values as next memory."""
        projected = [apply_linear(one, normed_RTD) for one in (self.q_proj, self.k_proj, self.v_proj)]
        query_RHTE, key_RGTE, value_RGTE = map(self._heads, projected, (self.q_norm, self.k_norm, None))
        query_RHTE, key_RGKE = rotate(query_RHTE, metadata.rotary), rotate(key_RGTE, metadata.rotary)
        value_RGKE = value_RGTE
        if key_values is not None:
            key_RGKE, value_RGKE = key_values.extend(key_RGKE, value_RGKE, metadata.chunk)  # [M' ; X']
        dropout = self.config.attention_dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        attended_RTx = attend(implementation, query_RHTE, key_RGKE, value_RGKE, metadata.mask, self.scale, dropout)
        output_RTD = apply_linear(self.o_proj, attended_RTx)
        if not remembers_input:
            return output_RTD, None
        return output_RTD, Memory(rotate(key_RGTE, metadata.memory_rotary), value_RGTE)

    def project_memory(self, normed_RTD: torch.Tensor, metadata: AttentionMetadata) -> Memory:
        """Returns the keys and values of this chunk that the next segment sees."""
        key_RTx, value_RTx = apply_linear(self.k_proj, normed_RTD), apply_linear(self.v_proj, normed_RTD)
        # The view of values is made after the rotation: its gradient comes first, and needs less memory.
        return Memory(rotate(self._heads(key_RTx, self.k_norm), metadata.memory_rotary), self._heads(value_RTx))

    def _heads(self, tensor_RTx: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        tensor_RxTE = tensor_RTx.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return tensor_RxTE if norm is None else norm(tensor_RxTE).to(tensor_RxTE.dtype)  # float32 under autocast


class MemoryShare(nn.Module):
    """The remembered states of a segment: M = X + a (Y - X), of a layer's input X and output Y."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        return blend(input_RTD, output_RTD, self.share)


def blend(input_RTD: torch.Tensor, output_RTD: torch.Tensor, share: float) -> torch.Tensor:
    """Returns X for a share of 0 and Y for a share of 1, unchanged."""
    if share in (0, 1):
        return output_RTD if share else input_RTD
    dtype = torch.promote_types(input_RTD.dtype, output_RTD.dtype)  # they differ for embeddings of another dtype
    return torch.lerp(input_RTD.to(dtype), output_RTD.to(dtype), share)


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
        takes_input = metadata.is_sink or self.memory_share.share == 0
        from_input = metadata.writes_memory and takes_input and not any(metadata.detach_R)
        attention_RTD, memory = self.self_attn(
            self.input_layernorm(input_RTD), key_values, metadata, remembers_input=from_input
        )
        hidden_RTD = input_RTD + attention_RTD
        output_RTD = hidden_RTD + self.mlp(self.post_attention_layernorm(hidden_RTD))
        if from_input or not metadata.writes_memory:
            return output_RTD, memory
        source_RTD = detach_rows(self.memory_share(input_RTD, output_RTD), metadata.detach_R)
        return output_RTD, self.project_memory(source_RTD, metadata)

    def project_memory(self, source_RTD: torch.Tensor, metadata: AttentionMetadata) -> Memory:
        """Returns the keys and values, of this chunk's hidden states [R, T, D], that the next segment sees."""
        return self.self_attn.project_memory(self.input_layernorm(source_RTD), metadata)


def detach_rows(source_RTD: torch.Tensor, detach_R: tuple[bool, ...]) -> torch.Tensor:
    """Stops the gradient through the memory of some rows (truncated backpropagation, `bptt_segments`)."""
    if all(detach_R):
        return source_RTD.detach()
    if not any(detach_R):
        return source_RTD
    runs = [(detach, len(list(run))) for detach, run in groupby(detach_R)]
    parts = source_RTD.split([rows for _, rows in runs])
    return torch.cat([part.detach() if detach else part for part, (detach, _) in zip(parts, runs, strict=True)])
