"""What a caller may get wrong, found before anything is computed.

Axes: B rows, N columns of an input, D model width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from .cache import FoldedCache
from .configuration import ATTENTION_IMPLEMENTATIONS, DTYPES, IGNORE_INDEX
from .durations import check_durations

GENERATION_ARGUMENTS = ("tokenizer", "assistant_tokenizer", "cache_position")
OUTPUT_ARGUMENTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def check_dtype(name: str) -> None:
    """Raises `ValueError` for the name of a dtype that models are not loaded in."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not known: choose one of {', '.join(DTYPES)}.")


def check_attention_name(name: str) -> None:
    """Raises `ValueError` for an implementation of attention that does not exist."""
    if name not in ATTENTION_IMPLEMENTATIONS:
        known = ", ".join(ATTENTION_IMPLEMENTATIONS)
        raise ValueError(f"attn_implementation={name!r} is not known: choose one of {known}.")


def check_attention(name: str) -> None:
    """Raises `ValueError` for an implementation of attention that does not exist or is not installed."""
    check_attention_name(name)
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise ValueError(
            "attn_implementation='flash_attention_2' needs a GPU and the package flash-attn: install it with "
            "pip install --no-build-isolation flash-attn, or choose sdpa."
        )


def check_input(
    config, input_ids, inputs_embeds, attention_mask, position_ids, cache, labels, durations, logits_to_keep
) -> torch.Tensor:
    """The tokens, [B, N] or [B, N, D]; raises `ValueError` where the arguments of a forward pass do not fit."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass either input_ids or inputs_embeds, and not both.")
    tokens = inputs_embeds if input_ids is None else input_ids
    expected = "[batch, tokens]" if input_ids is not None else "[batch, tokens, hidden_size]"
    if tokens.dim() != expected.count(",") + 1 or 0 in tokens.shape:
        raise ValueError(f"the input has shape {tuple(tokens.shape)}: pass at least one token, {expected}.")
    for name, ids in (("input_ids", input_ids), ("labels", labels)):
        if ids is not None and ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} are {ids.dtype}: pass token ids as whole numbers (torch.long).")
    if inputs_embeds is not None and inputs_embeds.shape[2] != config.hidden_size:
        raise ValueError(
            f"inputs_embeds are {inputs_embeds.shape[2]} wide and the model {config.hidden_size}: pass embeddings of "
            "this model."
        )
    if labels is not None and labels.device.type == "cpu":
        known = labels[labels != IGNORE_INDEX]
        if len(known) and not 0 <= int(known.min()) <= int(known.max()) < config.vocab_size:
            raise ValueError(
                f"labels reach from {known.min().item()} to {known.max().item()} in a vocabulary of "
                f"{config.vocab_size}: pass token ids, and {IGNORE_INDEX} where there is nothing to predict."
            )
    # On an accelerator the check would wait for the device; there the embedding itself asserts.
    if input_ids is not None and input_ids.device.type == "cpu":
        lowest, highest = input_ids.min().item(), input_ids.max().item()
        wrong = lowest if lowest < 0 else highest
        if wrong < 0 or wrong >= config.vocab_size:
            raise ValueError(
                f"token id {wrong} does not exist in a vocabulary of {config.vocab_size}: use the tokenizer that "
                "belongs to this checkpoint."
            )
    if cache is not None and not isinstance(cache, FoldedCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}: pass a FoldedCache, or none for a new text.")
    if cache is not None:
        cache.check_fits(config)
        cache.check_complete()
    shape = tuple(tokens.shape[:2])
    if attention_mask is not None:
        seen = 0 if cache is None else cache.get_seq_length()
        if tuple(attention_mask.shape) not in (shape, (shape[0], seen + shape[1])):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} fits neither the input {shape} nor all "
                f"{seen + shape[1]} columns seen with it: pass 1 for every token and 0 for padding."
            )
    if labels is not None and tuple(labels.shape) != shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit an input of shape {shape}: one label a token."
        )
    if durations is not None:
        check_durations(durations, shape)
    if logits_to_keep is not None and (not isinstance(logits_to_keep, int) or logits_to_keep < 0):
        raise ValueError(f"logits_to_keep={logits_to_keep!r}: pass how many of the last columns to keep, or 0 for all.")
    if position_ids is not None and tuple(position_ids.shape) not in (shape, (1, shape[1])):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} do not fit an input of shape {shape}: one a token."
        )
    if position_ids is not None and shape[1] > 1:
        _check_consecutive(position_ids, real_tokens(attention_mask, shape[1]))
    return tokens


def check_unused(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of a forward pass that would have no effect, but for those that `generate` itself uses."""
    for name, value in arguments.items():
        if name == "cache_position" and value is not None and (value.diff() != 1).any():
            raise ValueError(f"cache_position={value.tolist()}: columns must be consecutive. Leave it out.")
        if name in GENERATION_ARGUMENTS or (name in OUTPUT_ARGUMENTS and not value):
            continue
        if name in OUTPUT_ARGUMENTS:
            raise ValueError(
                f"{name}={value!r}: a folded model returns logits, loss and state. Leave it out; attention maps are "
                "made by condense attention."
            )
        raise TypeError(f"CondenseForCausalLM.forward() got an unexpected keyword argument {name!r}")


def real_tokens(attention_mask: torch.Tensor | None, num_columns: int) -> torch.Tensor | None:
    """The part [B, N] of the mask that concerns the input's own columns, as booleans on the host."""
    return None if attention_mask is None else attention_mask[:, -num_columns:].bool().cpu()


def check_tokenizer(config, tokenizer) -> None:
    """Raises `ValueError` where a tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model a vocabulary of {config.vocab_size}: use the "
            "checkpoint's own tokenizer, or model.resize_token_embeddings(len(tokenizer)) first."
        )


def _check_consecutive(position_ids: torch.Tensor, real_BN: torch.Tensor | None) -> None:
    for row, positions_N in enumerate(position_ids.cpu()):
        real_N = positions_N if real_BN is None else positions_N[real_BN[row if len(real_BN) > 1 else 0]]
        jumps = (real_N.diff() != 1).nonzero()
        if len(jumps):
            at = int(jumps[0])
            raise ValueError(
                f"position_ids of row {row} go from {real_N[at].item()} to {real_N[at + 1].item()}: positions must be "
                "consecutive. For fractional positions pass durations; for several documents pass several rows."
            )
