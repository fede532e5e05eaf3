"""The families of checkpoints that condense folds.

A folded model has the modules of a Llama, under the same names. This module holds what is specific to a family: biases
of the projections, norms of queries and keys, and attention that sees only a window.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

# Fields that say which layers of a stock model see only the last tokens. A folded model only stores them.
WINDOW_FIELDS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


class Family(NamedTuple):
    """`query_key_norms`: each head's queries and keys are normed before the rotary embedding."""

    model_class: type[PreTrainedModel]
    input_bias: bool | None = None  # of queries, keys and values; None: as `attention_bias` says
    output_bias: bool | None = None
    query_key_norms: bool = False

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        return self.model_class.config_class

    @property
    def title(self) -> str:
        return self.model_class.__name__.removesuffix("ForCausalLM")

    def biases(self, config: Any) -> tuple[bool, bool]:
        """Returns whether queries, keys and values have biases, and whether the output of attention has one."""
        given = getattr(config, "attention_bias", False)
        return (
            given if self.input_bias is None else self.input_bias,
            given if self.output_bias is None else self.output_bias,
        )


FAMILIES = {
    "llama": Family(LlamaForCausalLM),
    "mistral": Family(MistralForCausalLM, input_bias=False, output_bias=False),
    "qwen2": Family(Qwen2ForCausalLM, input_bias=True, output_bias=False),
    "qwen3": Family(Qwen3ForCausalLM, query_key_norms=True),
}


def family_of(config: Any) -> Family:
    """Returns the family of a folded or stock configuration; a stock Llama with a depth block is a Llama."""
    return FAMILIES.get(getattr(config, "family", config.model_type), FAMILIES["llama"])


def check_family(name: str) -> None:
    """Raises `ValueError` for a family that is not folded; names the nearest family that is."""
    if name not in FAMILIES:
        nearest = difflib.get_close_matches(str(name), FAMILIES, n=1)
        meant = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"family={name!r} is not folded: {meant}Choose one of {', '.join(FAMILIES)}.")


def folded_fields(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a folded model's configuration for the fields of a stock checkpoint, its `config.json`.

    The file leaves out fields with their family's default, which may differ from a Llama's.
    """
    if family == LlamaConfig.model_type:
        return {**fields, "family": family}
    complete = FAMILIES[family].config_class.from_dict(dict(fields)).to_dict()
    window = {name: complete.pop(name) for name in WINDOW_FIELDS if name in complete}
    return {**complete, "family": family, "window": window}


def check_window(window: Mapping[str, Any], segment_length: int) -> None:
    """Raises `ValueError` if layers of the stock model see fewer tokens than a folded model, 2 segments."""
    size, layers = window.get("sliding_window"), window.get("layer_types") or ["sliding_attention"]
    if size is not None and "sliding_attention" in layers and size < 2 * segment_length:
        raise ValueError(
            f"sliding_window={size}: the model never saw the 2 x {segment_length} tokens that a folded model sees. "
            f"Choose a segment_length of at most {size // 2}."
        )
