"""The models of a recipe, by kind: a kind's fields are the keys of `model`, and its methods load the model.

A new kind is a subclass of `ModelKind`, registered with `@MODELS.register`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from condense import CondenseConfig, CondenseForCausalLM, laboratories
from condense.checks import check_not_quantized
from condense.configuration import ATTENTION_IMPLEMENTATIONS, OWN_ATTENTION, SCHEDULES
from condense.execution.cuda_graph import STATIC_IMPLEMENTATIONS
from condense.families import FAMILIES
from condense.hub import loading
from condense.loss import max_tokens
from condense.utils.notices import say_once, without_notices

from .section import MAY_CHANGE, Registry, Section, one_of

STOCK_ATTENTION = ("auto", *(name for name in ATTENTION_IMPLEMENTATIONS if name not in OWN_ATTENTION))


class ModelKind(Section):
    """The interface of a model. Weights are float32; DeepSpeed or autocast makes copies in bfloat16."""

    kind: str
    source: str = Field(description="folder, hub id or GGUF file of the checkpoint that training starts from")

    has_segments: ClassVar[bool] = False  # a curriculum and losses by segment need them
    is_of_images: ClassVar[bool] = False
    attention_implementations: ClassVar[tuple[str, ...]] = STOCK_ATTENTION

    @abstractmethod
    def load_config(self) -> Any:
        """Returns the configuration to load the model with. Raises `ValueError` for a checkpoint of another type."""

    @abstractmethod
    def load(self, attention: str, attention_dropout: float, **options: Any) -> Any:
        """Returns the model in float32; `options` go to `from_pretrained`."""

    def _load(self, model_class: Any, attention: str, attention_dropout: float, **options: Any) -> Any:
        return loading.load_model(
            model_class,
            self.source,
            dtype=torch.float32,
            attn_implementation=attention_option(attention),
            attention_dropout=attention_dropout,
            **options,
        )

    def load_tokenizer(self, config: Any) -> Any:
        """Returns the tokenizer beside the model. Raises `ValueError` if it does not fit."""
        return loading.load_tokenizer(self.source, config)

    def run_configuration(self) -> dict[str, Any]:
        """Returns values of the model's configuration that hold only for the run."""
        return {}

    def checkpointing_options(self) -> dict[str, Any]:
        """Returns further arguments of the model's `gradient_checkpointing_enable`."""
        return {}

    def tokens_per_segment(self, config: Any) -> int | None:
        """Returns None if a text is read as a whole."""
        return None

    def check(self, attention: str, gradient_checkpointing: bool) -> None:
        """Raises `ValueError` for other keys of the recipe that do not fit this model."""
        check_implemented(attention, self.attention_implementations, f"model.kind={self.kind!r}")

    def check_machine(self) -> None:
        """Raises `ValueError` if this machine can't run the model."""

    def obstacle_to_zero_3(self, tokens: int, vocab_size: int, equal_lengths: bool) -> str | None:
        """Returns why micro-batches of up to `tokens` tokens can't be trained under ZeRO-3; None if they can.

        ZeRO-3 gathers a weight from all ranks for each use, so all ranks must use it equally often.
        """
        return None


def check_implemented(attention: str, names: Sequence[str], for_what: str) -> None:
    """Raises `ValueError` for an attention that is not among `names`."""
    if attention not in names:
        raise ValueError(f"{for_what} has no attention={attention}: choose one of {', '.join(names)}")


def check_not_prepared(source: str) -> PreTrainedConfig:
    """Returns the checkpoint's configuration. Raises `ValueError` for a model that an objective has wrapped, and for
    quantized weights."""
    config = loading.load_config(AutoConfig, source)
    check_not_quantized(config, f"training from model={source!r}")
    if getattr(config, "wraps_a_model", False):
        raise ValueError(
            f"model={source!r} is of type {config.model_type!r}, which an objective has made: start from the "
            "checkpoint that it was trained from, or save its base model "
            "(AutoModelForCausalLM.from_pretrained(FOLDER).bases[0].save_pretrained(OTHER))."
        )
    return config


def with_head_dim(config: Any) -> Any:
    """Returns the configuration with the width of a head, which a Qwen2's may lack."""
    if not hasattr(config, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def stock_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns the class of a configuration's stock model."""
    if config.model_type in laboratories.STOCK_MODELS:
        return resolve_name(laboratories.STOCK_MODELS[config.model_type])
    return FAMILIES[config.model_type].model_class


def attention_option(attention: str) -> str | None:
    return None if attention == "auto" else attention


MODELS = Registry[ModelKind](default="condense", elsewhere=laboratories.MODEL_KINDS)


Share = Annotated[float, Field(ge=0, le=1)]


def _read_sink(value: Any) -> Any:
    if value in (None, "none"):
        return "none"  # which a resolved recipe shows
    if value == "auto" or (isinstance(value, int) and value >= 0):
        return value
    raise ValueError("pass the id of a token, null for no sink, or auto")


@MODELS.register
class CondenseModel(ModelKind):
    """A folded model; `source` has a folded one, or a stock one of a family that condense folds."""

    kind: Literal["condense"] = "condense"
    segment_length: int | None = Field(None, ge=1, description="None: the model's own")
    memory_share: Share | list[Share] | None = Field(
        None,
        description="of a layer's output in its memory, one for all layers or each; None: the model's own, and 0.2 for "
        "a stock one",
    )
    sink_token_id: Annotated[int | Literal["auto", "none"], BeforeValidator(_read_sink)] = Field(
        "auto",
        description="the token of the attention sink; none (or null): no sink; auto: the model's own, and for a stock "
        "one the token that begins its texts",
    )
    bptt_segments: int | None = Field(None, ge=1, description="segments that a gradient crosses; None: all")
    schedule: Annotated[str, one_of(SCHEDULES), MAY_CHANGE] = Field("auto", description="order of layers and segments")
    offload_memories: Annotated[bool, MAY_CHANGE] = Field(
        False, description="checkpoints wait for the backward pass in the host's memory"
    )
    checkpoint_segments: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"] | None, MAY_CHANGE] = Field(
        None, description="segments to compute again at once; auto: for the least memory; None: enough to fill a GPU"
    )

    has_segments = True
    attention_implementations = ATTENTION_IMPLEMENTATIONS

    def load_config(self) -> CondenseConfig:
        config, given = check_not_prepared(self.source), self._given()
        if (sink := given.get("sink_token_id")) is not None and sink >= getattr(config, "vocab_size", sink + 1):
            raise ValueError(
                f"model.sink_token_id={sink} is not a token of the vocabulary of {config.vocab_size} that "
                f"model={self.source!r} has: set one of these, or null for no sink."
            )
        for name, default in {"segment_length": "null", "memory_share": "null", "sink_token_id": "auto"}.items():
            if name in given and (own := getattr(config, name, None)) not in (None, given[name]):
                say_once(
                    f"model.{name}={getattr(self, name)} replaces the {own} that the folded checkpoint {self.source} "
                    f"has; model.{name}={default} keeps it"
                )
        return loading.load_config(CondenseConfig, self.source, **self._given())

    def load(self, attention: str, attention_dropout: float, **options: Any) -> CondenseForCausalLM:
        with without_notices():  # it is to be trained
            model = self._load(CondenseForCausalLM, attention, attention_dropout, **self._given(), **options)
        model.logits_in_evaluation = False  # validation reads losses only
        return model

    def _given(self) -> dict[str, Any]:
        """Returns the fields of the configuration that the recipe sets."""
        names = ("segment_length", "memory_share", "bptt_segments")
        found: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.sink_token_id != "auto":
            found["sink_token_id"] = None if self.sink_token_id == "none" else self.sink_token_id
        return found

    def run_configuration(self) -> dict[str, Any]:
        return {"schedule": self.schedule}

    def checkpointing_options(self) -> dict[str, Any]:
        assert isinstance(self.checkpoint_segments, int), "see planning.checkpoint_groups"
        segments = {"checkpoint_segments": self.checkpoint_segments}
        return segments | ({"offload_memories": True} if self.offload_memories else {})

    def tokens_per_segment(self, config: Any) -> int:
        return self.segment_length or getattr(config, "segment_length", None) or CondenseConfig.segment_length

    def check(self, attention: str, gradient_checkpointing: bool) -> None:
        super().check(attention, gradient_checkpointing)
        if (self.offload_memories or self.checkpoint_segments not in (None, 1)) and not gradient_checkpointing:
            name = "offload_memories" if self.offload_memories else "checkpoint_segments"
            raise ValueError(f"model.{name} is for gradient checkpointing: set gradient_checkpointing=true too")
        if self.schedule == "wavefront" and gradient_checkpointing and self.checkpoint_segments == 1:
            raise ValueError(
                "gradient checkpointing computes each segment again alone, but model.schedule=wavefront runs several: "
                "set model.checkpoint_segments=8 (2 or more, or auto)"
            )
        if self.schedule == "graph":
            check_implemented(attention, tuple(STATIC_IMPLEMENTATIONS), "model.schedule=graph")

    def check_machine(self) -> None:
        if self.schedule == "graph" and not torch.cuda.is_available():
            raise ValueError("model.schedule=graph replays CUDA graphs, and there is no GPU: set another schedule.")

    def obstacle_to_zero_3(self, tokens: int, vocab_size: int, equal_lengths: bool) -> str | None:
        if self.schedule in ("wavefront", "graph"):
            return f"model.schedule={self.schedule!r} calls many layers at once"
        if not equal_lengths and tokens > max_tokens(vocab_size):  # ranks would take the loss in unequal numbers
            return (
                f"micro-batches of texts of unequal lengths hold at most {max_tokens(vocab_size)} tokens with a "
                f"vocabulary of {vocab_size}, and micro_batch x total_length is {tokens}"
            )
        return None


@MODELS.register
class StockModel(ModelKind):
    """A stock model of a family that condense folds, for comparison."""

    kind: Literal["stock"] = "stock"

    def load_config(self) -> PreTrainedConfig:
        config = check_not_prepared(self.source)
        if config.model_type not in (*FAMILIES, *laboratories.STOCK_MODELS):
            raise ValueError(
                f"model={self.source!r} is of type {config.model_type!r}: model.kind=stock trains models of the types "
                f"{', '.join(FAMILIES)}. condense convert FOLDED STOCK --to stock writes one."
            )
        return with_head_dim(config)

    def load(self, attention: str, attention_dropout: float, **options: Any) -> PreTrainedModel:
        model = self._load(stock_class(self.load_config()), attention, attention_dropout, **options)
        with_head_dim(model.config)
        return model
