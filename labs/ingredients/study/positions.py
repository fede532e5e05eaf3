"""A Llama without rotary embeddings: with a table of learned positions, or without positions.

Axes: B rows, N tokens, D hidden size, H width of a head.
"""

from typing import Any, Literal

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from condense.hub import loading
from condense.state.cache_argument import takes_past_key_values
from condense.training.recipe.models import MODELS, ModelKind, attention_option


class PositionsConfig(LlamaConfig):
    """A `LlamaConfig` with `learned_positions`; the table has `max_position_embeddings` rows."""

    model_type = "positions_llama"

    learned_positions: bool = False


class NoRotation(nn.Module):
    """Returns cosines of 1 and sines of 0 [B, N, H], so a Llama's layers do not rotate queries and keys."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden_BND: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones_BNH = hidden_BND.new_ones(*position_ids.shape, self.head_dim)
        return ones_BNH, torch.zeros_like(ones_BNH)


class PositionsModel(LlamaModel):
    config: PositionsConfig

    def __init__(self, config: PositionsConfig):
        super().__init__(config)
        self.rotary_emb = NoRotation(config.head_dim)
        if config.learned_positions:
            self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)  # GPT-2's name for it
        self.post_init()

    @takes_past_key_values
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(seen, seen + inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        if self.config.learned_positions:
            inputs_embeds = inputs_embeds + self.wpe(position_ids)
        return super().forward(None, attention_mask, position_ids, cache, inputs_embeds, **options)


class PositionsForCausalLM(LlamaForCausalLM):
    config: PositionsConfig

    def __init__(self, config: PositionsConfig):
        super().__init__(config)
        self.model = PositionsModel(config)
        self.post_init()


@MODELS.register
class PositionsKind(ModelKind):
    """Loads a `PositionsForCausalLM` from `source`."""

    kind: Literal["positions"] = "positions"

    def load_config(self) -> PositionsConfig:
        return loading.load_config(PositionsConfig, self.source)

    def load(self, attention: str, attention_dropout: float, **options: Any) -> PositionsForCausalLM:
        return loading.load_model(
            PositionsForCausalLM,
            self.source,
            dtype=torch.float32,
            attn_implementation=attention_option(attention),
            attention_dropout=attention_dropout,
            **options,
        )


def without_rotary(llama: LlamaForCausalLM, num_positions: int | None) -> PositionsForCausalLM:
    """Gives a model a Llama's weights and a table of `num_positions` random positions; None: no positions."""
    fields = llama.config.to_dict() | {"learned_positions": num_positions is not None}
    if num_positions is not None:
        fields["max_position_embeddings"] = num_positions
    fields.pop("model_type")
    model = PositionsForCausalLM(PositionsConfig(**fields))
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected and missing == (["model.wpe.weight"] if num_positions else [])
    return model
