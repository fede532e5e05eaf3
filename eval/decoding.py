"""Reads and decodes texts with any causal language model of transformers, for measurements.

Models with key-value caches, such as folded ones, read a text in parts and batches with padding. Stateful models
(`_is_stateful`: Mamba, RWKV, hybrids, ...) read a text in one call: some of them silently forget their state between
two calls of several tokens. Some mix up the rows of a batch, so rows are batched only if a trial shows no difference.

Axes: B rows, N tokens of a text, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

FACTS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the fields of a GenerationConfig that describe the model
TRIAL_TOKENS, PADDING, NEW = 24, 5, 3
_together: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # what the trials have shown


@contextmanager
def neutral_decoding(model: Any) -> Iterator[None]:
    """Replaces the model's `generation_config` by one that holds only its special tokens.

    A measurement sets its own decoding options. Without this, transformers fills in whatever `generate` isn't given
    from the checkpoint's file, even if another `GenerationConfig` is passed.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    own = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in FACTS})
    try:
        yield
    finally:
        model.generation_config = own


def reads_in_parts(model: Any) -> bool:
    """Whether a model can continue from a state (a cache) with several tokens in one call."""
    return not getattr(model, "_is_stateful", False)


@torch.no_grad()
def decodes_together(model: Any) -> bool:
    """Whether `generate` gives the rows of a padded batch the same tokens as each row on its own."""
    if reads_in_parts(model):
        return True
    if model not in _together:
        _together[model] = _try_together(model)
    return _together[model]


def _try_together(model: Any) -> bool:
    ids_N = _trial_ids(model)
    texts = [ids_N[PADDING:], ids_N.flip(0)]
    ids_BN = torch.stack([ids_N, texts[1]])
    mask_BN = torch.ones_like(ids_BN)
    mask_BN[0, :PADDING] = 0
    with neutral_decoding(model):
        output = model.generate(
            ids_BN, attention_mask=mask_BN, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    for row, text_N in enumerate(texts):
        written_N = output.sequences[row, ids_BN.shape[1] :]
        alone_NV = model(torch.cat([text_N, written_N])[None], use_cache=False).logits[0, len(text_N) - 1 : -1]
        together_NV = torch.stack([logits_BV[row] for logits_BV in output.logits])
        if not _are_close(together_NV, alone_NV, torch.finfo(model.dtype).eps ** 0.5):  # 0.0003 in float32
            return False
    return True


def _trial_ids(model: Any) -> torch.Tensor:
    """Returns random tokens [N], fewer than the model's positions."""
    generator = torch.Generator().manual_seed(0)
    most = min(TRIAL_TOKENS, (max_positions(model.config) or TRIAL_TOKENS) - NEW)
    vocab_size = model.get_input_embeddings().num_embeddings
    return torch.randint(vocab_size, (max(most, PADDING + 2),), generator=generator).to(model.device)


def _are_close(found_NV: torch.Tensor, expected_NV: torch.Tensor, bound: float) -> bool:
    """Whether logits differ by at most `bound` times their spread."""
    found_NV, expected_NV = found_NV.double(), expected_NV.double()
    spread = (expected_NV - expected_NV.mean(-1, keepdim=True)).norm()
    return bool((found_NV - expected_NV).norm() <= bound * spread)


def max_positions(config: Any) -> int | None:
    """Returns the number of positions in a config; None if it has none, as for Mamba."""
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def held_by_modules(model: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Returns tensors of modules that are neither weights nor buffers, such as RecurrentGemma's state."""
    if reads_in_parts(model):
        return {}
    return {
        (name, field): value
        for name, module in model.named_modules()
        for field, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def bytes_since(before: dict[tuple[str, str], torch.Tensor], model: Any) -> int:
    """Returns the bytes of the tensors of `held_by_modules` that have changed."""
    return sum(value.nbytes for key, value in held_by_modules(model).items() if before.get(key) is not value)
