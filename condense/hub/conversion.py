"""Conversion of a folded model to a stock one of its family: only the configuration changes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from ..checks import check_not_quantized
from ..configuration import OWN_ATTENTION, CondenseConfig
from ..families import family_of
from ..modeling import CondenseForCausalLM
from .loading import read_object
from .source_name import name_as_in_memory

TOKENIZER_CLASS, FORMER_TOKENIZER_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"  # one class, two names


def to_stock(model: CondenseForCausalLM) -> PreTrainedModel:
    """Returns the stock model with the same weights (shared, not copied) and device, in evaluation mode. A folded Llama
    becomes a `LlamaForCausalLM`, a folded Qwen3 a `Qwen3ForCausalLM`.

    It has the same attention implementation; transformers' default replaces "auto" and "blocked". Raises `ValueError`
    for a model with a depth block, and for quantized weights.
    """
    check_not_quantized(model.config, "conversion to a stock model")
    if model.config.depth is not None:
        raise ValueError(
            "a stock model has no depth block: convert the model that had all of its layers, or make the stock hybrid "
            "with condense.labs.depth.to_depth_llama."
        )
    family = family_of(model.config)
    window = dict(model.config.window or {})
    if layer_types := window.get("layer_types"):  # the caller may have requested fewer layers
        window["layer_types"] = layer_types[: model.config.num_hidden_layers]
    return with_weights_of(model, family.config_class, family.model_class, **window)


def write_former_names(folder: Path, source_class: str | None) -> None:
    """Adds to the files of a stock model and its tokenizer what transformers 4, and programs beside it, read there.

    transformers 5 has them under other names, too, and reads both. `source_class` is the `tokenizer_class` of the
    checkpoint that was folded.
    """
    config = read_object(folder / "config.json")
    rope = dict(config.get("rope_parameters") or {})
    former = {"torch_dtype": config.get("dtype"), "rope_theta": rope.pop("rope_theta", None)}
    former["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    _write(folder / "config.json", config | {name: value for name, value in former.items() if value is not None})
    path = folder / "tokenizer_config.json"
    tokenizer = read_object(path)
    if tokenizer.get("tokenizer_class") == TOKENIZER_CLASS:
        tokenizer["tokenizer_class"] = source_class
        if source_class in (None, TOKENIZER_CLASS):
            tokenizer["tokenizer_class"] = FORMER_TOKENIZER_CLASS
    if isinstance(special := tokenizer.get("extra_special_tokens"), list):  # transformers 4 fails for a list
        del tokenizer["extra_special_tokens"]
        tokenizer["additional_special_tokens"] = special
    _write(path, tokenizer)


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def with_weights_of(
    model: Any, config_class: Any, model_class: Any, weights: Mapping[str, torch.Tensor] | None = None, **fields: Any
) -> Any:
    """Returns a stock model with the given weights, or the weights of `model`; `fields` change its configuration."""
    kept = model.config.to_dict()
    foreign = [name for name in LlamaConfig.__annotations__ if not hasattr(config_class, name)]
    for name in [*CondenseConfig.__annotations__, "model_type", "architectures", *foreign]:
        kept.pop(name, None)
    if model.config.head_dim != model.config.hidden_size // model.config.num_attention_heads:
        kept["head_dim"] = model.config.head_dim  # Qwen2's configuration lacks this field, but its layers read it
    attention = model.config._attn_implementation
    attention = None if attention in OWN_ATTENTION else attention
    made = model_class(config_class(**(kept | fields), attn_implementation=attention))
    made.load_state_dict(model.state_dict() if weights is None else weights, assign=True)
    if model.lm_head.weight is model.model.embed_tokens.weight:  # a checkpoint may hold both, whatever its config says
        made.tie_weights()
    made.generation_config = model.generation_config
    name_as_in_memory(made, model.config.name_or_path, "converted")
    return made.to(model.device).eval()  # also moves the rotary tables, which are not weights
