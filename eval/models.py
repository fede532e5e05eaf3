"""The models that are evaluated: folded and stock ones, loaded and run in the same way."""

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList

from condense import FoldedCache, laboratories
from condense.checks import check_attention, check_dtype
from condense.generation.nonfinite_logits import RefuseNonFiniteLogits
from condense.generation.prefill import columns_per_call
from condense.hub.fingerprint import fingerprint
from condense.hub.loading import check_source, load_config, load_model, load_tokenizer
from condense.hub.weights import weights_fingerprint
from condense.state.cache_argument import cache_of

from .decode_state import state_bytes
from .decoding import bytes_since, decodes_together, held_by_modules, neutral_decoding, reads_in_parts

laboratories.register_models()
TOKENS_PER_BATCH = 2**18  # of all rows, in memory at one time
SETTINGS_OF_SOURCE = "config_and_tokenizer"  # of `describe`: the hash of these files
PREFILL_TOKENS = 8192  # columns of a prompt in one call, so memory beside the state does not grow with the prompt


class EvaluatedModel:
    """A model and its tokenizer, under the name that tables and plots use.

    `settings` is the hash of its files without weights, if it comes from files: see `condense.hub.fingerprint`.
    """

    def __init__(self, name: str, source: str, model: Any, tokenizer: Any, settings: str | None = None):
        self.name, self.source, self.tokenizer, self.config = name, source, tokenizer, model.config
        self._model, self._settings, self._description = model, settings, dict[str, Any]()

    @property
    def model(self) -> Any:
        return self._model

    @property
    def segment_length(self) -> int | None:
        """Returns the tokens of a segment; None for a stock model."""
        return getattr(self.config, "segment_length", None)

    def describe(self) -> dict[str, Any]:
        """Returns the fields that identify a model in the settings of a measurement."""
        if not self._description:
            model = self.model
            self._description = {
                "name": self.name,
                "source": self.source,
                "model_type": self.config.model_type,
                "parameters": model.num_parameters(),
                "segment_length": self.segment_length,
                "memory_source": getattr(self.config, "memory_source", None),
                **_share_and_sink(self.config),
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": model.device.type,
                "weights": weights_fingerprint(model),
            } | ({} if self._settings is None else {SETTINGS_OF_SOURCE: self._settings})
        return dict(self._description)


class InMemory:
    """Keeps one model in memory, of several that are evaluated in turn."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._model: Any = None

    def model_of(self, owner: Any, load: Callable[[], Any]) -> Any:
        if self._owner is not owner:
            former = [] if self._model is None else [weakref.ref(one) for one in self._model.parameters()]
            self._owner = self._model = None  # frees the former model before the next is loaded
            if any(parameter() is not None for parameter in former):  # reference cycles hold it
                gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._model = load()
            self._owner = owner
        return self._model


class StoredModel(EvaluatedModel):
    """A checkpoint that loads its weights when `model` is accessed: see `InMemory`."""

    def __init__(self, named: str, in_memory: InMemory, load_model: Callable[[str], Any]):
        self.name, self.source = split_name(named)
        self.config = load_config(AutoConfig, self.source)
        self.tokenizer = load_tokenizer(self.source, self.config)
        self._in_memory, self._load, self._description = in_memory, load_model, dict[str, Any]()
        self._settings = fingerprint(self.source, weights=False)

    @property
    def model(self) -> Any:
        return self._in_memory.model_of(self, lambda: self._load(self.source))


def _share_and_sink(config: Any) -> dict[str, Any]:
    """Returns the memory's share of a layer's output, unless the memory is all of it, and the sink, if there is one."""
    share, sink = getattr(config, "memory_share", 1), getattr(config, "sink_token_id", None)
    if isinstance(share, list) and len(set(share)) == 1:
        (share,) = set(share)
    return ({} if share == 1 else {"memory_share": share}) | ({} if sink is None else {"sink_token_id": sink})


def split_name(named: str) -> tuple[str, str]:
    """Splits `NAME=SOURCE`, or SOURCE, named after its last part. An existing path is always a source."""
    name, equals, source = named.partition("=")
    if not equals or not name or "/" in name or Path(named).exists():
        own = Path(named).name
        return Path(named).resolve().name if own in ("", "..") else own, named
    return name, source


def load_evaluated(
    named: str, dtype: str = "auto", attention: str = "auto", device_map: str | None = None
) -> EvaluatedModel:
    """Loads one model, as `load_models` does."""
    (found,) = load_models([named], dtype, attention, device_map)
    return found


def load_models(
    named: Sequence[str], dtype: str = "auto", attention: str = "auto", device_map: str | None = None
) -> list[EvaluatedModel]:
    """Loads models, `NAME=SOURCE` or SOURCE, on the GPU if there is one: one at a time in memory.

    A source is a folder, a hub id or a GGUF file.

    `device_map="auto"` divides the weights over all GPUs. Raises `ValueError` if a model is missing, of an unknown kind
    or damaged, if its tokenizer does not fit, or if two models have the same name.
    """
    check_dtype(dtype)
    check_attention(attention)
    names = [split_name(item)[0] for item in named]
    if len(set(names)) < len(names):
        raise ValueError(f"two models are called {names}: give each a different name with --model NAME=FOLDER.")
    for item in named:  # before the first one is loaded
        check_source(split_name(item)[1])

    def load(source: str) -> Any:
        given: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
        attn_implementation = None if attention == "auto" else attention
        model = load_model(AutoModelForCausalLM, source, dtype=dtype, attn_implementation=attn_implementation, **given)
        if device_map is None:
            model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return model.eval()

    in_memory = InMemory()
    models: list[EvaluatedModel] = [StoredModel(item, in_memory, load) for item in named]
    for model in models:
        model.describe()  # loads it: damage is found before anything is measured
    return models


@torch.no_grad()
def generate(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, int]:
    """Returns the tokens [B, N + new] of the model's own `generate`, and the bytes of the state of all rows at the end.

    Only `options` control decoding: see `neutral_decoding`. Long prompts are read in chunks. Rows that have ended are
    filled up with the padding token.
    """
    with neutral_decoding(model):
        if len(input_ids) == 1 or decodes_together(model):
            return _generate(model, input_ids, attention_mask, **options)
        rows = [  # without their padding
            _generate(model, ids_N[mask_N.bool()][None], mask_N[mask_N.bool()][None], **options)
            for ids_N, mask_N in zip(input_ids, attention_mask, strict=True)
        ]
    pad = options.get("pad_token_id")
    written = [row_1N[0, int(mask_N.sum()) :] for (row_1N, _), mask_N in zip(rows, attention_mask, strict=True)]
    new_BN = pad_sequence(written, batch_first=True, padding_value=0 if pad is None else pad)
    return torch.cat([input_ids.to(new_BN.device), new_BN], dim=1), sum(num_bytes for _, num_bytes in rows)


def _generate(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, int]:
    if input_ids.shape[1] > PREFILL_TOKENS and reads_in_parts(model):
        options["prefill_chunk_size"] = columns_per_call(model, PREFILL_TOKENS)
    before = held_by_modules(model)
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([RefuseNonFiniteLogits()]),
        **options,
    )
    cache = cache_of(output)
    held = cache.num_bytes if isinstance(cache, FoldedCache) else state_bytes(cache)
    return output.sequences, held + bytes_since(before, model)


def rows_per_batch(evaluated: EvaluatedModel, num_tokens: int) -> int:
    """Returns the batch size for this length: a stock model keeps whole prompts, a folded one one call's columns."""
    columns = num_tokens if evaluated.segment_length is None else min(num_tokens, PREFILL_TOKENS)
    return max(1, TOKENS_PER_BATCH // columns)
