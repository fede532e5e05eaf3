"""The models that are compared: one shape, equally many parameters, random weights.

- `folded`: this package's.
- `stock`: transformers' Llama.
- `sliding_window`: transformers' Mistral, the nearest peer that is maintained: its state is bounded too, its layers
  are the Llama's, weight for weight. What it lacks is a memory: a token sees the last 2 segments, which is the most
  that a folded one sees directly, and what lies further back only as far as layers reach.
"""

from typing import Any

from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from condense import CondenseConfig, CondenseForCausalLM
from condense.loading import load_config

KINDS = ("folded", "stock", "sliding_window")
TABLE_1_PARAMETERS = 126_489_088
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def table_1() -> dict[str, Any]:
    """The paper's configuration for memory and speed: Llama 3.2 with 4 layers of width 512, 126 million parameters."""
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
    return _fields(config)


def shape_of(source: str, vocab_size: int | None = None) -> dict[str, Any]:
    """The shape of a Llama, from a folder, a hub id or the preset `table1`; optionally with fewer token types."""
    if source == "table1":
        fields = table_1()
    else:
        config = load_config(AutoConfig, source)
        if not isinstance(config, LlamaConfig):
            raise ValueError(f"{source!r} is of type {config.model_type!r}: profiles compare Llamas.")
        fields = _fields(config)
    return fields if vocab_size is None else fields | {"vocab_size": vocab_size}


def _fields(config: LlamaConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SHAPE_FIELDS}


def build(kind: str, shape: dict[str, Any], segment_length: int | None, attention: str) -> Any:
    """A model with random weights. Raises `ValueError` for an unknown kind."""
    options = {"attn_implementation": None if attention == "auto" else attention}
    if kind == "folded":
        return CondenseForCausalLM(CondenseConfig(**shape, **options, segment_length=segment_length))
    if kind == "stock":
        return LlamaForCausalLM(LlamaConfig(**shape, **options))
    if kind == "sliding_window":
        assert segment_length is not None
        return MistralForCausalLM(MistralConfig(**shape, **options, sliding_window=2 * segment_length))
    raise ValueError(f"there is no kind of model {kind!r}: choose from {', '.join(KINDS)}.")
