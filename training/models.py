"""The model that a recipe trains: its configuration, its weights and its tokenizer."""

from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from condense import CondenseConfig, CondenseForCausalLM, loading

from .recipe import Recipe


def load_config(recipe: Recipe) -> LlamaConfig:
    """The configuration that the recipe's model is loaded with. Raises `ValueError` for what is no Llama."""
    if recipe.folded:
        return loading.load_config(CondenseConfig, recipe.model, **_fields(recipe))
    config = loading.load_config(AutoConfig, recipe.model)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"model={recipe.model!r} is of type {config.model_type!r}: a recipe trains Llamas.")
    return config


def load_model(recipe: Recipe, **options: Any) -> Any:
    """The model in float32: bfloat16 is DeepSpeed's or autocast's copy, and the optimizer needs the originals."""
    return loading.load_model(
        CondenseForCausalLM if recipe.folded else LlamaForCausalLM,
        recipe.model,
        dtype=torch.float32,
        attn_implementation=None if recipe.attention == "auto" else recipe.attention,
        attention_dropout=recipe.attention_dropout,
        **_fields(recipe),
        **options,
    )


def load_tokenizer(recipe: Recipe, config: LlamaConfig) -> Any:
    """The tokenizer beside the model. Raises `ValueError` where it does not fit."""
    return loading.load_tokenizer(recipe.model, config)


def _fields(recipe: Recipe) -> dict[str, Any]:
    given = {"segment_length": recipe.segment_length, "bptt_segments": recipe.bptt_segments}
    return {name: value for name, value in given.items() if value is not None}
