"""Conversion of a folded model to a stock Llama: only the configuration changes."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .configuration import OWN_ATTENTION, CondenseConfig
from .modeling import CondenseForCausalLM


def to_llama(model: CondenseForCausalLM) -> LlamaForCausalLM:
    """The stock Llama with the same weights (shared, not copied) and device, in evaluation mode.

    It has the same attention implementation; transformers' default replaces "auto" and "blocked".
    """
    if model.config.depth is not None:
        raise ValueError(
            "a stock Llama has no depth block: convert the model that had all of its layers, or make the stock hybrid "
            "with condense.depth.to_depth_llama."
        )
    return with_weights_of(model, LlamaConfig, LlamaForCausalLM)


def with_weights_of(
    model: Any, config_class: Any, model_class: Any, weights: Mapping[str, torch.Tensor] | None = None, **fields: Any
) -> Any:
    """A stock model with the weights of `model`, or those given; `fields` change the fields of its configuration."""
    kept = model.config.to_dict()
    for name in [*(set(CondenseConfig.__annotations__)), "model_type", "architectures"]:
        kept.pop(name, None)
    attention = model.config._attn_implementation
    attention = None if attention in OWN_ATTENTION else attention
    made = model_class(config_class(**(kept | fields), attn_implementation=attention))
    made.load_state_dict(model.state_dict() if weights is None else weights, assign=True)
    if (
        model.lm_head.weight is model.model.embed_tokens.weight
    ):  # a checkpoint may hold both although its config ties them
        made.tie_weights()
    made.generation_config = model.generation_config
    return made.to(model.device).eval()  # also moves the rotary tables, which are no weights
