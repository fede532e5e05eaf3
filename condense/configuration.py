"""The configuration of a folded model: the fields of a Llama, and the fields of segment recurrence."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .families import FAMILIES, check_family, check_window, folded_fields
from .gguf_files import HUB_OPTIONS, config_fields, find_file
from .hub.peft_support import add_default_targets
from .hub.remote_code import RemoteCodeConfig
from .laboratories import STOCK_MODELS
from .state.cache_argument import CACHE_NAMES
from .utils.choices import check_choice
from .utils.notices import say_once

MEMORY_SOURCES = ("layer_output", "layer_input")
SCHEDULES = ("auto", "sequential", "wavefront", "graph")
POSITION_ANCHORS = ("end", "start")
OWN_ATTENTION = ("auto", "blocked", "varlen")
WITHOUT_DROPOUT = ("blocked", "flex_attention", "varlen")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
VOCABULARY = ("vocab_size", "bos_token_id", "eos_token_id")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_IMPLEMENTATIONS = (*OWN_ATTENTION, "eager", "sdpa", "flash_attention_2", "flex_attention")
# Their frequencies depend on the longest position of a call, above a limit.
LENGTH_ROPE_TYPES = ("dynamic", "longrope")
IGNORE_INDEX = -100  # the label of a token that is not predicted
# Of a stock checkpoint. With share 1, which the paper trains, untrained ones diverge (condense/hub/untrained.py).
STOCK_SHARE = 0.2


class CondenseConfig(RemoteCodeConfig, LlamaConfig):
    """A `LlamaConfig` with:

    segment_length: tokens per segment, L; attention spans the last segment and the current one.
    memory_source: the hidden states that a layer stores of a segment: its own output (`"layer_output"`) or its
        input (`"layer_input"`, as in Transformer-XL), another name for the share 0.
    memory_share: the share a of a layer's output Y in what it stores of a segment, beside its input X:
        M = X + a (Y - X). One number, or a list with one for each layer; with any above 0 information passes through
        any number of segments.
    sink_token_id: the token whose keys and values, as at the beginning of a text, stand in place of each memory's first
        row (an attention sink); None for none. They are constants of the model, and no part of a text's state.
    bptt_segments: None lets gradients cross every segment border; `k` detaches the memory after
        segments k, 2k, 3k ..., so a graph spans k segments.
    schedule: the order in which (layer, segment) cells run: `"sequential"` runs all layers of a segment and
        then the next segment, `"wavefront"` runs all cells of a diagonal at once, `"graph"` replays CUDA graphs of
        groups of segments; `"auto"` trains by graphs on CUDA, and elsewhere chooses one of the others by size.
    depth: the settings of a depth block, which `condense.labs.depth.convert_to_depth` puts in place of some layers.
    position_anchor: the position of a token of fractional duration: the `"end"` or the `"start"` of its interval.
    family: the family of the checkpoint that was folded: `"llama"`, `"mistral"`, `"qwen2"` or `"qwen3"`.
    window: that checkpoint's fields of sliding-window attention.
    folded_weights: a fingerprint of that checkpoint's weights: while a model has them, its memory is untrained.

    These are a configuration's own defaults. `from_pretrained` of a stock checkpoint takes, where nothing is given,
    memory_share=0.2 and the token that begins the checkpoint's texts as sink, and says so.

    Raises `ValueError` for other values, and for a checkpoint of a family that is not folded.
    """

    model_type = "condense_llama"
    # Outputs that are not predictions, which Trainer would gather with the logits.
    keys_to_ignore_at_inference = [*CACHE_NAMES, "segment_losses", "segment_targets", "function_evaluations"]

    segment_length: int = 512
    memory_source: str = "layer_output"
    memory_share: float | list[float] = 1.0
    sink_token_id: int | None = None
    bptt_segments: int | None = None
    schedule: str = "auto"
    position_anchor: str = "end"
    depth: dict | None = None
    family: str = "llama"
    window: dict | None = None
    folded_weights: str | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_llama_fields(vars(self))
        _check_frequencies(self)
        self.check()

    def check(self, num_layers: int | None = None) -> None:
        """Raises `ValueError` naming the first invalid field of segment recurrence.

        `num_layers` are the layers of a model, which has more than `num_hidden_layers` during early-exit drafting.
        """
        _check_count("segment_length", self.segment_length)
        check_family(self.family)
        check_window(self.window or {}, self.segment_length)
        _check_rope_length(self)
        _check_sink(self.sink_token_id, self.vocab_size)
        if self.bptt_segments is not None:
            _check_count("bptt_segments", self.bptt_segments, " or None for full backpropagation")
        for name, choices in (
            ("memory_source", MEMORY_SOURCES),
            ("schedule", SCHEDULES),
            ("position_anchor", POSITION_ANCHORS),
        ):
            check_choice(name, getattr(self, name), choices)
        _check_share(self.memory_share, num_layers or self.num_hidden_layers)
        if self.memory_source == "layer_input" and self.memory_share != 1:
            raise ValueError(
                f"memory_share={self.memory_share!r} with memory_source='layer_input', which is the share 0 of every "
                "layer: pass memory_source='layer_output' to use the share, or memory_share=1.0 to keep the input."
            )

    @property
    def memory_shares(self) -> tuple[float, ...]:
        """Returns each layer's share of its output in its memory."""
        if self.memory_source == "layer_input":
            return (0.0,) * self.num_hidden_layers
        if isinstance(self.memory_share, list):
            return tuple(map(float, self.memory_share))
        return (float(self.memory_share),) * self.num_hidden_layers

    @property
    def control_size(self) -> int:
        """Returns the number of components of the control that the model takes."""
        return self.depth["control_size"] if self.depth else 0

    def to_dict(self) -> dict[str, Any]:
        """Extends transformers' method: PEFT then knows the default targets of the model."""
        add_default_targets(self.model_type)
        return super().to_dict()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Reads the config of a folded or a stock checkpoint; raises `ValueError` for a family that is not folded."""
        source = str(pretrained_model_name_or_path)
        if (file := kwargs.pop("gguf_file", None)) is not None:
            hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
            source = f"{source}/{file}"
            config_dict = config_fields(find_file(pretrained_model_name_or_path, file, **hub_options))
        else:
            config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        model_type, own = config_dict.get("model_type"), (cls.model_type, *STOCK_MODELS)
        if model_type not in (*own, *FAMILIES):
            raise ValueError(
                f"{pretrained_model_name_or_path!r}: its config.json has model_type={model_type!r}, and condense folds "
                f"checkpoints of the types {', '.join(FAMILIES)}, and loads its own ({', '.join(own)})."
            )
        given = {name: kwargs[name] for name in cls.__annotations__ if name in kwargs}  # checked with the rest
        if model_type in FAMILIES:
            memory = _memory_of_stock(model_type, config_dict | kwargs)
            config_dict = folded_fields(model_type, config_dict) | memory
            if memory:
                values = " and ".join(f"{name}={value}" for name, value in memory.items())
                defaults = "defaults" if len(memory) > 1 else "default"
                say_once(
                    f"{source!r} is folded with {values}, the {defaults} for a stock checkpoint; condense convert "
                    "--measure finds its own."
                )
        return {**config_dict, **given, "model_type": cls.model_type}, kwargs


def _memory_of_stock(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the memory of a stock checkpoint as far as `fields`, of its file and the caller, leave it open.

    The sink is the first token of its texts, or else the one that ends them; None if it has neither.
    """
    found: dict[str, Any] = {}
    if "memory_share" not in fields and fields.get("memory_source") != "layer_input":
        found["memory_share"] = STOCK_SHARE
    if "sink_token_id" not in fields:
        known = FAMILIES[model_type].config_class  # files leave its defaults out
        size, *named = (fields.get(name, getattr(known, name, None)) for name in VOCABULARY)
        first = [token[0] if isinstance(token, list) and token else token for token in named]
        found["sink_token_id"] = next((token for token in first if _is_token(token, size)), None)
    return found


def check_llama_fields(fields: Mapping[str, Any], where: str = "") -> None:
    """Raises `ValueError` for invalid sizes and unknown names in the fields of a Llama's configuration.

    `where` is a prefix for the messages, such as the path of the file.
    """
    for name in SIZES:
        if fields.get(name) is not None:
            _check_count(where + name, fields[name])
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise ValueError(
            f"{where}num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}: correct one."
        )
    if (head_dim := fields.get("head_dim")) and head_dim % 2:
        raise ValueError(f"{where}head_dim={head_dim}: rotary positions need an even number.")
    activation, rope = fields.get("hidden_act"), fields.get("rope_parameters") or fields.get("rope_scaling")
    rope_type = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
    theta = fields.get("rope_theta") if not isinstance(rope, Mapping) else rope.get("rope_theta", 1)
    if theta is not None and not (isinstance(theta, int | float) and theta > 0):
        raise ValueError(f"{where}rope_theta={theta!r}: pass a number above 0.")
    if activation is not None:
        check_choice(where + "hidden_act", activation, sorted(ACT2FN))
    if rope_type is not None:
        check_choice(where + "rope_type", rope_type, ["default", *ROPE_INIT_FUNCTIONS])


def _check_frequencies(config: CondenseConfig) -> None:
    """Raises `ValueError` for rotary parameters that do not give a frequency for each pair of a head's dimensions."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return
    try:
        with torch.device("cpu"):
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
            fit = 2 * len(frequencies) == config.head_dim and scaling > 0
            fit = fit and bool((torch.isfinite(frequencies) & (frequencies >= 0)).all())
        reason = "they give no frequency for each pair of a head's dimensions"
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        fit, reason = False, f"{type(error).__name__}: {error}"
    if not fit:
        raise ValueError(f"rope_parameters={rope!r} do not fit ({reason}): correct them in config.json.")


def _check_rope_length(config: CondenseConfig) -> None:
    """Raises `ValueError` if rotary frequencies would depend on the length of the text, or on other rows."""
    rope = config.rope_parameters
    if rope["rope_type"] not in LENGTH_ROPE_TYPES:
        return
    name = "max_position_embeddings" if rope["rope_type"] == "dynamic" else "original_max_position_embeddings"
    limit = config.max_position_embeddings if rope["rope_type"] == "dynamic" else rope[name]
    if 2 * config.segment_length > limit:
        raise ValueError(
            f"rope_type={rope['rope_type']!r}: above {name}={limit} the rotary frequencies depend on the length of the "
            f"text, and a segment and its memory have 2 x {config.segment_length} tokens. Choose a segment_length of "
            f"at most {limit // 2}."
        )


def _check_share(share: Any, num_layers: int) -> None:
    shares = share if isinstance(share, list) else [share] * num_layers
    numbers = [one for one in shares if isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one <= 1]
    if not len(numbers) == len(shares) == num_layers:
        raise ValueError(f"memory_share={share!r}: pass a number from 0 to 1, or one for each of {num_layers} layers.")


def _check_sink(token_id: Any, vocab_size: int) -> None:
    if token_id is not None and not _is_token(token_id, vocab_size):
        raise ValueError(
            f"sink_token_id={token_id!r} is not a token of a vocabulary of {vocab_size}: pass the id of one, such as "
            "bos_token_id, or None for no sink."
        )


def _is_token(token_id: Any, vocab_size: int) -> bool:
    return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size


def _check_count(name: str, value, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a number of at least 1: pass a positive whole number{alternative}.")
