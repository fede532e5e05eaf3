"""Checks of a caller's arguments, made before anything is computed.

Axes: B rows of a batch, N columns of an input, D hidden size, n real tokens of a row.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from .configuration import ATTENTION_IMPLEMENTATIONS, DTYPES, IGNORE_INDEX
from .state.cache import FoldedCache
from .token_inputs import check_token_inputs
from .utils.choices import check_choice

GENERATION_ARGUMENTS = ("tokenizer", "assistant_tokenizer", "cache_position")
# Arguments that collators of packed documents pass to the attention kernels of other models.
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
NOT_EXPORTED = ("attention_mask", "position_ids", "labels", "durations", "cache", "use_cache")
OUTPUT_ARGUMENTS = ("output_attentions", "output_router_logits")


def check_dtype(name: str) -> None:
    """Raises `ValueError` for a dtype that models can't be loaded in."""
    check_choice("dtype", name, DTYPES)


def quantization_of(config: Any) -> str | None:
    """Returns the name of the method that a model's weights are quantized by; None if they are not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found.quant_method
    return str(getattr(method, "value", method))


def check_not_quantized(config: Any, action: str) -> None:
    """Raises `ValueError` for a model with quantized weights, which `action` can't compute with."""
    if (method := quantization_of(config)) is not None:
        raise ValueError(
            f"{action}: the model's weights are quantized ({method}). Do this with the model in full precision that "
            "they were made from, and quantize the result when it is loaded."
        )


def check_attention_name(name: str) -> None:
    """Raises `ValueError` for an implementation of attention that does not exist."""
    check_choice("attn_implementation", name, ATTENTION_IMPLEMENTATIONS)


def check_attention(name: str) -> None:
    """Raises `ValueError` for an implementation of attention that does not exist or is not installed."""
    check_attention_name(name)
    needs = None
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        needs = "a GPU and the package flash-attn (pip install --no-build-isolation flash-attn)"
    elif name == "varlen" and not torch.cuda.is_available():
        needs = "a CUDA GPU, and there is none"
    if needs is not None:
        raise ValueError(f"attn_implementation={name!r} needs {needs}: choose sdpa.")


def check_input(config, given: Mapping[str, Any], labels=None, logits_to_keep=None) -> torch.Tensor:
    """Returns the tokens, [B, N] or [B, N, D]; raises `ValueError` if arguments of `forward` do not fit together.

    The mask is on the host.
    """
    tokens = _check_tokens(config, given.get("input_ids"), given.get("inputs_embeds"))
    cache, attention_mask = given.get("cache"), given.get("attention_mask")
    shape = (tokens.shape[0], tokens.shape[1])
    if labels is not None:
        _check_labels(config, labels, shape)
    if cache is not None:
        check_cache(config, cache)
    if attention_mask is not None:
        _check_mask(attention_mask, shape, cache)
    check_token_inputs(config, given, shape)
    if logits_to_keep is not None and (not isinstance(logits_to_keep, int) or logits_to_keep < 0):
        raise ValueError(f"logits_to_keep={logits_to_keep!r}: pass the number of last columns to keep, or 0 for all.")
    if (position_ids := given.get("position_ids")) is not None:
        _check_positions(position_ids, attention_mask, shape)
    return tokens


def check_shares(config, layers) -> None:
    """Raises `ValueError` if the configuration's memory shares have changed since the layers were made with them."""
    for number, (layer, share) in enumerate(zip(layers, config.memory_shares, strict=False)):
        made_with = getattr(layer, "memory_share", None)
        if made_with is not None and made_with.share != share:
            raise ValueError(
                f"layer {number} was made with the memory share {made_with.share}, and model.config now gives {share}: "
                "pass memory_share or memory_source to from_pretrained or to the CondenseConfig of a new model."
            )


def check_export(arguments: Mapping[str, Any]) -> None:
    """Raises `ValueError` in an export for arguments whose values decide how a text is read, and for a cache."""
    if not torch.compiler.is_exporting():
        return
    for name in NOT_EXPORTED:
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(
                f"{name} is given: torch.export takes input_ids or inputs_embeds of texts without padding, and returns "
                "logits. Leave it out (docs/tools.md)."
            )


def _check_tokens(config, input_ids, inputs_embeds) -> torch.Tensor:
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass either input_ids or inputs_embeds, and not both.")
    tokens = inputs_embeds if input_ids is None else input_ids
    expected = "[batch, tokens]" if input_ids is not None else "[batch, tokens, hidden_size]"
    if tokens.dim() != expected.count(",") + 1 or 0 in tokens.shape:
        raise ValueError(f"the input has shape {tuple(tokens.shape)}: pass at least one token, {expected}.")
    if input_ids is None and not (tokens.shape[2] == config.hidden_size and tokens.is_floating_point()):
        raise ValueError(
            f"inputs_embeds are {tokens.shape[2]} wide and {tokens.dtype}: pass the model's own, floating point and "
            f"{config.hidden_size} wide."
        )
    if input_ids is not None:
        _check_whole_numbers("input_ids", input_ids)
    if input_ids is not None and _has_values_at_hand(input_ids):
        lowest, highest = input_ids.min().item(), input_ids.max().item()
        wrong = lowest if lowest < 0 else highest
        if wrong < 0 or wrong >= config.vocab_size:
            raise ValueError(
                f"token id {wrong} does not exist in a vocabulary of {config.vocab_size}: use the model's tokenizer."
            )
    return tokens


def _has_values_at_hand(ids: torch.Tensor) -> bool:
    """Returns False on an accelerator, because a check would wait for the device and the embedding itself asserts, and
    in an export, which has shapes but not values.
    """
    return ids.device.type == "cpu" and not torch.compiler.is_exporting()


def _check_labels(config, labels: torch.Tensor, shape: tuple[int, int]) -> None:
    _check_whole_numbers("labels", labels)
    if _has_values_at_hand(labels):
        known = labels[labels != IGNORE_INDEX]
        if len(known) and not 0 <= int(known.min()) <= int(known.max()) < config.vocab_size:
            raise ValueError(
                f"labels reach from {known.min().item()} to {known.max().item()} in a vocabulary of "
                f"{config.vocab_size}: pass token ids, and {IGNORE_INDEX} at tokens that are not predicted."
            )
    _check_shape("labels", labels, shape)


def _check_whole_numbers(name: str, ids: torch.Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} are {ids.dtype}: pass token ids as whole numbers (torch.long).")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, int], *others: tuple[int, int]) -> None:
    if tuple(tensor.shape) not in (shape, *others):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} do not fit an input of shape {shape}: pass one for each token."
        )


def check_cache(config, cache) -> None:
    """Raises `ValueError` for a cache of another model or of an interrupted call."""
    if not isinstance(cache, FoldedCache):
        raise ValueError(f"the cache is a {type(cache).__name__}: pass a FoldedCache, or none for a new text.")
    cache.check_fits(config)
    cache.check_complete()


def _check_mask(attention_mask: torch.Tensor, shape: tuple[int, int], cache: FoldedCache | None) -> None:
    num_columns = shape[1] + (0 if cache is None else cache.get_seq_length())
    if tuple(attention_mask.shape) not in (shape, (shape[0], num_columns)):
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} fits neither the input {shape} nor all "
            f"{num_columns} columns of the texts so far: pass 1 for every token and 0 for padding."
        )
    if attention_mask.dtype != torch.bool:
        wrong = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if len(wrong):
            raise ValueError(
                f"attention_mask has the value {wrong[0].item()}: pass 1 for every token and 0 for padding. For "
                "several documents in a row pass position_ids that begin anew at each."
            )


def _check_positions(position_ids: torch.Tensor, attention_mask: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """Raises `ValueError` unless positions are consecutive at the real tokens of each row."""
    _check_shape("position_ids", position_ids, shape, (1, shape[1]))
    if shape[1] == 1:
        return
    real_BN = real_tokens(attention_mask, shape[1])
    for row, positions_N in enumerate(position_ids.cpu()):
        real_n = positions_N if real_BN is None else positions_N[real_BN[row if len(real_BN) > 1 else 0]]
        jumps = (real_n.diff() != 1).nonzero()
        if len(jumps):
            first = int(jumps[0])
            raise ValueError(
                f"position_ids of row {row} go from {real_n[first].item()} to {real_n[first + 1].item()}: positions "
                "must be consecutive. For fractional positions pass durations; for several documents pass several rows."
            )


def check_unused(arguments: Mapping[str, Any], position_ids: torch.Tensor | None, cache: FoldedCache | None) -> None:
    """Raises an error for arguments that have no effect, except arguments that `generate` itself passes, and packing
    arguments that agree with `position_ids` (compared by `find_documents`).
    """
    for name, value in arguments.items():
        if value is None or (name in PACKING_ARGUMENTS and position_ids is not None and cache is None):
            continue
        if name == "cache_position":
            _check_columns(torch.as_tensor(value), cache.get_seq_length() if isinstance(cache, FoldedCache) else 0)
        if name in GENERATION_ARGUMENTS or (name in OUTPUT_ARGUMENTS and not value):
            continue
        raise TypeError(f"CondenseForCausalLM.forward() got an unexpected keyword argument {name!r}")


def _check_columns(cache_position: torch.Tensor, num_seen: int) -> None:
    """Raises `ValueError` unless columns directly follow the columns that the cache has seen."""
    expected = torch.arange(num_seen, num_seen + cache_position.numel())
    if not torch.equal(cache_position.cpu().long(), expected):
        raise ValueError(
            f"cache_position={cache_position.tolist()} with a cache of {num_seen} columns: columns must be consecutive "
            "and begin there. Leave it out."
        )


def real_tokens(attention_mask: torch.Tensor | None, num_columns: int) -> torch.Tensor | None:
    """Returns the last N columns of the mask, which belong to the input: booleans [B, N] on the host."""
    return None if attention_mask is None else attention_mask[:, -num_columns:].bool().cpu()


def check_full_attention(config, num_tokens: int, reader: str, shorter: Callable[[int], str]) -> None:
    """Raises `ValueError` for a text with more tokens than `reader`, a stock model, has positions for.

    `shorter` says what to set for texts of at most a number of tokens.
    """
    known = config.max_position_embeddings
    if num_tokens > known:
        raise ValueError(
            f"{reader} reads texts of up to {num_tokens:,} tokens with full attention, and its config.json has "
            f"max_position_embeddings={known:,}: set {shorter(known)}, or use another model."
        )


def check_tokenizer(config, tokenizer) -> None:
    """Raises `ValueError` if a tokenizer has ids outside the model's vocabulary."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model a vocabulary of {config.vocab_size}: use the "
            "checkpoint's own tokenizer, or model.resize_token_embeddings(len(tokenizer)) first."
        )
