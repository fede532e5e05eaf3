"""The models that a profile names: shapes with random weights, and checkpoints, of any causal LM of transformers.

A Llama's shape is measured in several kinds (`models.MODEL_KINDS`); see `ProfiledModel.kinds` for other models.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from condense import CondenseConfig, CondenseForCausalLM, laboratories
from condense.families import FAMILIES, folded_fields
from condense.hub.loading import load_config, load_model

from ..models import split_name
from .cases import ModelVariant
from .models import MODEL_KINDS, SHAPE_FIELDS, build_model, table_1
from .options import DEFAULT_KINDS, ProfileOptions
from .tables import SHAPE

laboratories.register_models()
FOLDED, STOCK, LLAMA = "condense_llama", "stock", "llama"
NOT_A_SHAPE = (  # fields of a config.json
    "transformers_version", "architectures", "dtype", "_name_or_path", "folded_weights",
)  # fmt: skip


@dataclass(frozen=True)
class ProfiledModel:
    """A model to profile. `config` holds its config.json; weights come from `checkpoint`, or are random if None."""

    name: str
    config: dict[str, Any]
    checkpoint: str | None = None

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    @property
    def is_llama_shape(self) -> bool:
        return self.checkpoint is None and self.model_type == LLAMA

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:12]

    def kinds(self, chosen: Sequence[str] | None) -> list[str]:
        """Returns the kinds to measure it in. Raises `ValueError` if none of the chosen ones applies."""
        if self.checkpoint is not None:
            return ["folded" if self.model_type == FOLDED else STOCK]
        known: Sequence[str] = DEFAULT_KINDS if self.model_type in FAMILIES else (STOCK,)
        biased = self.is_llama_shape and bool(self.config.get("attention_bias") or self.config.get("mlp_bias"))
        if self.is_llama_shape:  # a Mistral has no biases
            known = [kind for kind in MODEL_KINDS if kind != "sliding_window" or not biased]
        found = [kind for kind in chosen or DEFAULT_KINDS if kind in known]
        if not found:
            raise ValueError(
                f"kinds={list(chosen or ())}: {self.name!r} is of type {self.model_type!r}"
                f"{' with biases' if biased else ''}, which is measured as "
                f"{' or '.join(known)}. Add one of these, or leave the model out."
            )
        return found

    def segments(self, chosen: Sequence[int]) -> Sequence[int]:
        return [self.config["segment_length"]] if self.checkpoint and self.model_type == FOLDED else chosen

    def describe(self) -> dict[str, Any]:
        config = AutoConfig.for_model(**self.config).get_text_config()
        shape = {field: getattr(config, field, None) for field in SHAPE.values()}
        return {"name": self.name, "model_type": self.model_type, "checkpoint": self.checkpoint, "shape": shape,
                "config": self.config}  # fmt: skip


def read_models(options: ProfileOptions) -> list[ProfiledModel]:
    """Returns a profile's models in order. Raises `ValueError` for two of one name or an unreadable one."""
    if options.preset is not None:
        given = {} if options.vocab_size is None else {"vocab_size": options.vocab_size}
        return [ProfiledModel(options.preset, {"model_type": LLAMA, **table_1(), **given})]
    found = [_from_config(*split_name(named), options.vocab_size) for named in options.configs]
    for name, source in map(split_name, options.models):
        found.append(ProfiledModel(name, _fields(load_config(AutoConfig, source)), checkpoint=source))
    names = [model.name for model in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two models are called {twice[0]!r}: give each a different name with NAME=FOLDER.")
    return found


def _with_vocabulary(config: Any, vocab_size: int) -> Any:
    """Returns the configuration, without special tokens outside the vocabulary."""
    for part in (config, config.get_text_config()):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(part, name, None)
            if any(token >= vocab_size for token in (value if isinstance(value, list) else [value or 0])):
                setattr(part, name, None)
    config.get_text_config().vocab_size = vocab_size
    return config


def _from_config(name: str, source: str, vocab_size: int | None) -> ProfiledModel:
    config = load_config(AutoConfig, source)
    if isinstance(config, CondenseConfig):
        config = _stock_config(name, config)
    return ProfiledModel(name, _fields(config if vocab_size is None else _with_vocabulary(config, vocab_size)))


def _stock_config(name: str, config: CondenseConfig) -> Any:
    """Returns the Llama that a folded configuration came from; segments come from the options."""
    if config.depth is not None or config.family != LLAMA:
        raise ValueError(
            f"{name!r} is a folded {config.family}{' with a depth block' if config.depth else ''}: pass the checkpoint "
            "with --model, or the configuration of the stock model."
        )
    own = {"model_type", *CondenseConfig.__annotations__}
    return FAMILIES[LLAMA].config_class(**{name: value for name, value in _fields(config).items() if name not in own})


def _fields(config: Any) -> dict[str, Any]:
    fields = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in NOT_A_SHAPE}


def build(profiled: ProfiledModel, variant: ModelVariant, dtype: str) -> Any:
    """Returns the model on the CPU: a checkpoint in `dtype`, and random weights in float32."""
    options = {"attn_implementation": None if variant.attention == "auto" else variant.attention}
    if profiled.checkpoint is not None:
        model_class = CondenseForCausalLM if variant.kind == "folded" else AutoModelForCausalLM
        return load_model(model_class, profiled.checkpoint, dtype=getattr(torch, dtype), **options)
    fields = profiled.config
    if variant.kind == STOCK:
        given = {name: value for name, value in options.items() if value is not None}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), **given)
    if variant.kind == "folded":
        family = profiled.model_type
        folded = {name: value for name, value in folded_fields(family, fields).items() if name != "model_type"}
        return CondenseForCausalLM(CondenseConfig(**folded, **options, segment_length=variant.segment_length))
    shape = {name: fields[name] for name in SHAPE_FIELDS}
    return build_model(variant.kind, shape, variant.segment_length, variant.attention)


def check_models(models: Sequence[ProfiledModel], attentions: Sequence[str]) -> None:
    """Raises `ValueError` for models that transformers can't build, at all or with one of these attentions."""
    for profiled in models:
        if profiled.checkpoint is not None or profiled.is_llama_shape:
            continue  # files are checked when loaded; a Llama has every implementation
        for attention in attentions:
            try:
                with torch.device("meta"):
                    build(profiled, ModelVariant(kind=STOCK, attention=attention), "float32")
            except Exception as error:  # each class of transformers has its own checks
                said = " ".join(str(error).split())
                with_it = "" if attention == "auto" else f" with --attention {attention}"
                raise ValueError(
                    f"{profiled.name!r}, of type {profiled.model_type!r}, can't be built as a causal language model"
                    f"{with_it} ({said}): leave it out, or pass another."
                ) from error


def fixed_positions(config: Any) -> int | None:
    """Returns the most tokens that a model with a table of positions can read; None without such a table."""
    if getattr(config, "rope_parameters", None) is not None:
        return None
    return getattr(config, "max_position_embeddings", None)
