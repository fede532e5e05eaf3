"""A Llama layer over [memory ; current segment]: equations 17-20 of the folded context condensation paper.

    Q = X W_Q,  K = [Y_memory ; X] W_K,  V = [Y_memory ; X] W_V     (all behind the layer's input norm)
    Y = X + Attention(Q, K, V) W_O,  Y = Y + MLP(norm(Y))

Y_memory, the layer's own output for the segment before, is projected once, when it is known, and
travels on as keys and values. Parameters are those of a Llama, under the same names.

Axes: R rows, T tokens of a step, D model width, H query heads, G key/value heads, E head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from .attention import Visibility, attend
from .configuration import CondenseConfig
from .memory import Memory, Past
from .segmentation import Piece, on_device


@dataclass(frozen=True)
class Step:
    """What all layers share while one piece is processed.

    Rotary tables are (cos, sin), each [R or 1, T, E]: of the tokens' coordinates in [memory ; current
    segment], and of the coordinates that they will have as the next segment's memory. `remembers` is
    false where nothing follows that could read a memory. `cut_R` tells in which rows no gradient may
    reach this segment through the memory.
    """

    piece: Piece
    rotary: tuple[torch.Tensor, torch.Tensor]
    memory_rotary: tuple[torch.Tensor, torch.Tensor]
    visibility: Visibility
    remembers: bool
    cut_R: tuple[bool, ...]

    def views(self, past: Past | None) -> Iterator[tuple[slice, Visibility, Past | None]]:
        """Rows that attend in the same way, what they may see, and where from."""
        yield slice(None), self.visibility, past


class RMSNorm(LlamaRMSNorm):
    """A Llama's norm; on CUDA as one kernel, which keeps for the backward pass nothing but its input."""

    def forward(self, hidden_RTD: torch.Tensor) -> torch.Tensor:
        return self.fused(hidden_RTD) if hidden_RTD.is_cuda else super().forward(hidden_RTD)

    def fused(self, hidden_RTD: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_RTD, self.weight.shape, self.weight, self.variance_epsilon)


class CondenseAttention(nn.Module):
    def __init__(self, config: CondenseConfig):
        super().__init__()
        self.config = config
        self.head_width = config.head_dim
        self.scale = config.head_dim**-0.5
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_width, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_width, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_width, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_width, width, bias=bias)

    def _heads(self, tensor_RTx: torch.Tensor) -> torch.Tensor:
        return tensor_RTx.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def remember(self, normed_RTD: torch.Tensor, step: Step) -> Memory:
        """Keys and values of what the next segment will see of this step."""
        key_RGTE = _rotate(self._heads(self.k_proj(normed_RTD)), step.memory_rotary)
        return Memory(key_RGTE, self._heads(self.v_proj(normed_RTD)))

    def forward(self, normed_RTD: torch.Tensor, past: Past | None, step: Step) -> torch.Tensor:
        query_RHTE = _rotate(self._heads(self.q_proj(normed_RTD)), step.rotary)
        key_RGTE = _rotate(self._heads(self.k_proj(normed_RTD)), step.rotary)
        value_RGTE = self._heads(self.v_proj(normed_RTD))
        attended = [
            self._attend(query_RHTE[rows], key_RGTE[rows], value_RGTE[rows], visibility, rows_past, step.piece)
            for rows, visibility, rows_past in step.views(past)
        ]
        return self.o_proj(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _attend(self, query_RHTE, key_RGTE, value_RGTE, visibility: Visibility, past: Past | None, piece: Piece):
        if past is None:
            key_RGKE, value_RGKE = key_RGTE, value_RGTE
        else:
            key_RGKE, value_RGKE = past.extend(key_RGTE, value_RGTE, piece)
        dropout = self.config.attention_dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        return attend(implementation, query_RHTE, key_RGKE, value_RGKE, visibility, self.scale, dropout)


def _rotate(tensor_RHTE: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos_R1TE, sin_R1TE = (table.unsqueeze(1) for table in rotary)
    # Under autocast tables are float32 and projections are not: keys must stay of the values' type.
    return (tensor_RHTE * cos_R1TE + rotate_half(tensor_RHTE) * sin_R1TE).to(tensor_RHTE.dtype)


class CondenseDecoderLayer(nn.Module):
    def __init__(self, config: CondenseConfig):
        super().__init__()
        self.remembers_output = config.memory_source == "layer_output"
        self.self_attn = CondenseAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_RTD: torch.Tensor, past: Past | None, step: Step) -> tuple[torch.Tensor, Memory | None]:
        """The layer's output [R, T, D] and, where the step remembers, its share of the next memory."""
        attended_RTD = input_RTD + self.self_attn(self.input_layernorm(input_RTD), past, step)
        output_RTD = attended_RTD + self.mlp(self.post_attention_layernorm(attended_RTD))
        if not step.remembers:
            return output_RTD, None
        source_RTD = output_RTD if self.remembers_output else input_RTD
        if all(step.cut_R):
            source_RTD = source_RTD.detach()
        elif any(step.cut_R):
            cut_R11 = on_device(torch.tensor(step.cut_R), source_RTD.device)[:, None, None]
            source_RTD = source_RTD.detach().where(cut_R11, source_RTD)
        return output_RTD, self.self_attn.remember(self.input_layernorm(source_RTD), step)
