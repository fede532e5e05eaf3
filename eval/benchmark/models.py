"""The models that are compared: the same shape and number of parameters, with random weights.

- `folded`: this package's model.
- `stock`: transformers' Llama, which computes the logits of all tokens at once.
- `stock_chunked_loss`: the same Llama with this package's loss, for a bounded number of logits at a time.
- `sliding_window`: transformers' Mistral, the nearest maintained peer. Its state is also bounded, and its layers have a
  Llama's weights. It has no memory: a token sees the last 2 segments, and earlier tokens only through the layers below.
  A token of a folded model directly sees at most as much.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from condense import CondenseConfig, CondenseForCausalLM
from condense.loss import cross_entropies, max_tokens
from condense.loss_gradient import head_gradients

from .cases import SCHEDULES, WITHOUT_SEGMENTS, ModelVariant

MODEL_KINDS = ("folded", *WITHOUT_SEGMENTS, "sliding_window")
TABLE_1_PARAMETERS = 126_489_088
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "hidden_act", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class ChunkedLossLlama(LlamaForCausalLM):
    """A stock Llama with a folded model's loss: for labels [B, N] it returns the loss without logits."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **arguments: Any) -> Any:
        if labels is None:
            return super().forward(input_ids=input_ids, **arguments)
        hidden_BND = self.model(input_ids=input_ids, **arguments).last_hidden_state
        return CausalLMOutput(loss=self.loss_in_blocks(hidden_BND[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    def loss_in_blocks(self, hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of hidden states."""
        gradients = head_gradients(self.lm_head) if torch.is_grad_enabled() else None
        tokens = max_tokens(self.config.vocab_size)
        if gradients is None:
            total = cross_entropies(self.lm_head, hidden_nD, target_n, tokens).sum()
        else:
            total = gradients.total([gradients.block_loss(hidden_nD, target_n, tokens)[0]])
        return total / len(target_n)


def table_1() -> dict[str, Any]:
    """Returns the paper's configuration for memory and speed: Llama 3.2, 4 layers of width 512, 126 million weights."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    return {name: getattr(config, name) for name in SHAPE_FIELDS}


def build_model(kind: str, shape: dict[str, Any], segment_length: int | None, attention: str) -> Any:
    """Returns a model with random weights; `kind` is one of `MODEL_KINDS`."""
    options = {"attn_implementation": None if attention == "auto" else attention}
    if kind == "folded":
        return CondenseForCausalLM(CondenseConfig(**shape, **options, segment_length=segment_length))
    if kind in WITHOUT_SEGMENTS:
        model_class = ChunkedLossLlama if kind == "stock_chunked_loss" else LlamaForCausalLM
        return model_class(LlamaConfig(**shape, **options))
    assert kind == "sliding_window", kind
    assert segment_length is not None
    return MistralForCausalLM(MistralConfig(**shape, **options, sliding_window=2 * segment_length))


def configure(model: Any, variant: ModelVariant) -> None:
    """Prepares a model for a variant of its kind; it reads these settings in every forward pass."""
    model.set_attn_implementation(variant.attention)
    if variant.kind == "folded":
        model.config.segment_length = variant.segment_length
        model.config.schedule = variant.schedule
        model.fixed_decoding = variant.fixed_decoding
    set_checkpointing(model, variant.checkpointing, variant.checkpoint_segments)


def set_checkpointing(model: Any, enabled: bool, segments: int = 1) -> None:
    """Sets gradient checkpointing: by layer in stock models, by groups of segments in a folded one."""
    if enabled:
        groups = {"checkpoint_segments": segments} if hasattr(model.config, "segment_length") else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **groups})
    else:
        model.gradient_checkpointing_disable()


def folded_variants(segments: Sequence[int], attention: str = "sdpa") -> list[ModelVariant]:
    """Returns a folded model with each segment length and each schedule."""
    return [
        ModelVariant(kind="folded", attention=attention, segment_length=segment, schedule=schedule)
        for segment in segments
        for schedule in SCHEDULES
    ]


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Casts parameters like `from_pretrained`; `model.to(dtype)` would also round rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def parameter_bytes(model: Any) -> int:
    """Returns the bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
