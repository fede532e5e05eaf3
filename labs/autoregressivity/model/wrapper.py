"""Common parts of models that wrap a base model: configuration, gradient checkpointing, generation, losses by segment.

A base model is a folded model, or a stock model of a family that can be folded: its logits are the head's product with
the decoder's hidden states, and its positions are relative.

Axes: B rows of a batch, N columns of an input (padding included), n target tokens, D hidden size, S segments.
"""

import copy
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from condense import loss
from condense.configuration import IGNORE_INDEX, CondenseConfig
from condense.families import FAMILIES
from condense.generation.mixin import OwnCacheGenerationMixin
from condense.hub.remote_code import RemoteCodeConfig
from condense.laboratories import DEPTH_LLAMA
from condense.ops.shared_weights import share_weights
from condense.state.cache_argument import CACHE, CACHE_NAMES
from condense.utils.files import use_default_mode

from .late_cache import LateCache


class WrapperConfig(RemoteCodeConfig, PreTrainedConfig):
    """A configuration with `base`: the base model's configuration, or its fields."""

    sub_configs = {"base": AutoConfig}
    keys_to_ignore_at_inference = [*CACHE_NAMES, "segment_losses", "segment_targets"]
    wraps_a_model = True

    base: Any = None

    def __post_init__(self, **kwargs):
        if isinstance(self.base, dict):
            self.base = AutoConfig.for_model(**self.base)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.base.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def use_cache(self) -> bool:
        return self.base.use_cache

    @use_cache.setter
    def use_cache(self, value: bool) -> None:  # Trainer switches it off for the run
        self.base.use_cache = value


@dataclass
class WrapperOutput(CausalLMOutputWithPast):
    """With labels, `segment_losses` [S] are the summed losses of the predictions made in each segment, and
    `segment_targets` [S] their numbers; S = 1 for a base without segments."""

    segment_losses: torch.Tensor | None = None
    segment_targets: torch.Tensor | None = None


class WrapperForCausalLM(PreTrainedModel, OwnCacheGenerationMixin):
    config_class = WrapperConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`
    _no_split_modules = ["CondenseDecoderLayer", "DepthBlock", "LlamaDecoderLayer", "StockDepthBlock"]
    _skip_keys_device_placement = CACHE_NAMES
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _is_stateful = True
    _supported_generation_modes = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    @property
    @abstractmethod
    def bases(self) -> list[Any]:
        """Returns the base models."""

    @classmethod
    def around(cls, base: Any, **fields: Any) -> Any:
        """Returns the model without weights, with the mode, configuration and generation settings of `base`.

        Raises `ValueError` for a model that can't be a base.
        """
        if isinstance(base, WrapperForCausalLM):
            raise ValueError(f"the model is already a {type(base).__name__}: pass its base.")
        known = (CondenseConfig.model_type, DEPTH_LLAMA, *FAMILIES)
        if base.config.model_type not in known:
            raise ValueError(f"the base is a {base.config.model_type!r}: pass a model of the types {', '.join(known)}.")
        config = cls.config_class(base=base.config.to_dict(), **fields)
        with torch.device("meta"):
            model = cls(config)
        model.config.base = base.config  # the same object: a change in one changes the other
        model.generation_config = copy.deepcopy(base.generation_config)
        return model.train(base.training)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        return requested_attention or "sdpa"  # the base models check and choose their own

    def get_input_embeddings(self):
        return self.bases[0].get_input_embeddings()

    def _set_gradient_checkpointing(self, *arguments, **options) -> None:
        for base in self.bases:  # a folded base checks the options, and has some of its own
            base._set_gradient_checkpointing(*arguments, **options)

    def save_pretrained(self, save_directory, *arguments, **options):
        """Saves as in transformers; others may read the files as far as the process's umask allows."""
        super().save_pretrained(save_directory, *arguments, **options)
        use_default_mode(Path(save_directory))

    def prepare_call(self, cache, use_cache, labels, unused: dict[str, Any]) -> LateCache | None:
        """Returns the cache of a call. Raises `ValueError` for unknown arguments, and if they do not fit together."""
        for name, value in unused.items():
            if name != "tokenizer" and value is not None and value is not False:
                raise ValueError(f"{name}={value!r}: a {type(self).__name__} does not accept it. Leave it out.")
        cache = LateCache(len(self.bases)) if use_cache and cache is None else cache
        if cache is None:
            return None
        if not isinstance(cache, LateCache):
            raise ValueError(f"the cache is a {type(cache).__name__}: pass a LateCache({len(self.bases)}).")
        if self.training and any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
            raise ValueError(
                "gradient checkpointing reads segments twice, but a cache only once: call eval() before generate()."
            )
        if labels is not None:
            raise ValueError("a loss is computed without a cache: leave out labels, or cache and use_cache.")
        return cache

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs) -> None:
        for name in ("cache_implementation", "prefill_chunk_size"):
            if (value := getattr(generation_config, name)) is not None:
                raise ValueError(f"{name}={value!r}: a {type(self).__name__} reads its prompt at once. Leave it out.")
        if generation_config.use_cache is False:
            raise ValueError("use_cache=False reads the whole text again for every token: leave it out.")
        if model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = LateCache(len(self.bases))

    def segments_of(self, positions_BN: torch.Tensor) -> torch.Tensor:
        """Returns the number of each token's segment, [B, N]; 0 if the base does not have segments."""
        length = getattr(self.config.base, "segment_length", None)
        return positions_BN // length if length else torch.zeros_like(positions_BN)


def real_tokens(input_ids_BN: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Returns [B, N] on the device of the tokens, false at padding."""
    if attention_mask is None:
        return torch.ones_like(input_ids_BN, dtype=torch.bool)
    return attention_mask[:, -input_ids_BN.shape[1] :].to(input_ids_BN.device, torch.bool)


def positions_of(input_ids_BN: torch.Tensor, attention_mask: torch.Tensor | None, seen: int = 0) -> torch.Tensor:
    """Returns the position [B, N] of each token in its text, counted from 0 without padding, after `seen` columns."""
    num_columns = input_ids_BN.shape[1]
    if attention_mask is None:
        return torch.arange(seen, seen + num_columns, device=input_ids_BN.device).expand(input_ids_BN.shape)
    return (attention_mask.to(input_ids_BN.device).long().cumsum(dim=1) - 1).clamp(min=0)[:, -num_columns:]


class SegmentSums:
    """The loss of a call, and its parts by segment."""

    def __init__(self, segments_BN: torch.Tensor):
        self.segments_BN = segments_BN
        self.sums_S = torch.zeros(int(segments_BN.max()) + 1, device=segments_BN.device)
        self.targets_S = torch.zeros_like(self.sums_S, dtype=torch.long)
        self.losses: list[torch.Tensor] = []

    def add(self, head: Any, hidden_BND: torch.Tensor, targets_BN: torch.Tensor) -> None:
        """Adds the cross-entropies of targets; hidden states may have fewer columns, which then hold all targets.

        Without any target the head still takes part: ranks that add gradients must have the same ones.
        """
        targets_BN = targets_BN[:, : hidden_BND.shape[1]]
        chosen_BN = targets_BN != IGNORE_INDEX
        losses_n = cross_entropies(head, hidden_BND[chosen_BN], targets_BN[chosen_BN])
        segments_n = self.segments_BN[:, : hidden_BND.shape[1]][chosen_BN]
        self.sums_S.index_add_(0, segments_n, losses_n.detach().to(self.sums_S.dtype))
        self.targets_S += torch.bincount(segments_n, minlength=len(self.targets_S))
        self.losses.append(losses_n.sum())

    def output(self, num_items: int | torch.Tensor | None) -> WrapperOutput:
        """Returns the mean over all targets, or the sum divided by `num_items`."""
        number = self.targets_S.sum().clamp(min=1) if num_items is None else num_items
        loss = torch.stack(self.losses).sum() / number
        return WrapperOutput(loss=loss, segment_losses=self.sums_S, segment_targets=self.targets_S)


def cross_entropies(head: Any, hidden_nD: torch.Tensor, target_n: torch.Tensor) -> torch.Tensor:
    """Returns -log p(target) [n] in float32 (float64 for float64 models), for a bounded number of logits at a time.

    The backward pass recomputes the logits, unless the vocabulary is smaller than the hidden size.
    """
    vocab_size, size = head.weight.shape
    with share_weights():
        return loss.cross_entropies(head, hidden_nD, target_n, loss.max_tokens(vocab_size), vocab_size > size)
