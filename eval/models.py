"""The models that are evaluated: folded and stock ones, loaded and run in the same way."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList

import condense  # noqa: F401  registers folded models with the Auto classes
from condense.cache import FoldedCache
from condense.checks import check_attention, check_dtype
from condense.generation import RefuseNonFiniteLogits
from condense.loading import check_source, load_model, load_tokenizer
from condense.prefill import columns_per_call

TOKENS_PER_BATCH = 2**18  # of all rows, in memory at one time
PREFILL_TOKENS = 8192  # columns of a prompt in one call: the memory beside the state does not grow with the prompt


class EvaluatedModel(NamedTuple):
    """A model and its tokenizer, under the name that tables and plots use."""

    name: str
    source: str
    model: Any
    tokenizer: Any

    @property
    def segment_length(self) -> int | None:
        """None for a stock model."""
        return getattr(self.model.config, "segment_length", None)

    def describe(self) -> dict[str, Any]:
        """The fields that identify a model in the settings of a measurement."""
        config = self.model.config
        return {
            "name": self.name,
            "source": self.source,
            "model_type": config.model_type,
            "parameters": self.model.num_parameters(),
            "segment_length": self.segment_length,
            "memory_source": getattr(config, "memory_source", None),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "weights": _fingerprint(self.model),
        }


def _fingerprint(model: Any) -> str:
    """The hash of the weights: a model that was trained further in the same folder is another one."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def split_name(named: str) -> tuple[str, str]:
    """Name and source of `NAME=SOURCE` or SOURCE, whose name is its last part. A path that exists is a source."""
    name, equals, source = named.partition("=")
    if not equals or not name or "/" in name or Path(named).exists():
        return Path(named).name, named
    return name, source


def load_evaluated(named: str, dtype: str = "auto", attention: str = "auto") -> EvaluatedModel:
    """Loads `NAME=SOURCE` or SOURCE, a folder or hub id, on the GPU if there is one.

    Raises `ValueError` for a source without a model of a known kind, for a damaged one, and for a tokenizer that does
    not fit.
    """
    name, source = split_name(named)
    model = load_model(
        AutoModelForCausalLM, source, dtype=dtype, attn_implementation=None if attention == "auto" else attention
    )
    tokenizer = load_tokenizer(source, model.config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EvaluatedModel(name, source, model.to(device).eval(), tokenizer)


def load_models(named: Sequence[str], dtype: str = "auto", attention: str = "auto") -> list[EvaluatedModel]:
    """Several models as `load_evaluated` loads them. Raises `ValueError` where two have the same name."""
    check_dtype(dtype)
    check_attention(attention)
    names = [split_name(item)[0] for item in named]
    if len(set(names)) < len(names):
        raise ValueError(f"two models are called {names}: give each of them another name with --model NAME=FOLDER.")
    for item in named:  # before the first one is loaded
        check_source(split_name(item)[1])
    return [load_evaluated(item, dtype, attention) for item in named]


@torch.no_grad()
def generate(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """The tokens [B, N + new] of the model's own `generate`, and its cache. Long prompts are read in chunks."""
    if input_ids.shape[1] > PREFILL_TOKENS:
        options["prefill_chunk_size"] = columns_per_call(model, PREFILL_TOKENS)
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([RefuseNonFiniteLogits()]),
        **options,
    )
    return output.sequences, output.past_key_values


def rows_per_batch(evaluated: EvaluatedModel, num_tokens: int) -> int:
    """Rows of prompts of this length: a stock model keeps whole prompts, a folded one the columns of one call."""
    columns = num_tokens if evaluated.segment_length is None else min(num_tokens, PREFILL_TOKENS)
    return max(1, TOKENS_PER_BATCH // columns)


def state_bytes(cache: Any) -> int:
    """The bytes of the state that a model has after a text."""
    if isinstance(cache, FoldedCache):
        return cache.num_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
