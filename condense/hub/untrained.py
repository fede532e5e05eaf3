"""Folded stock checkpoints whose memory was never trained: how they are known, and what is said of them.

The configuration has a fingerprint of the weights that were folded. While a model has these weights, its memory is
untrained, whoever loads or saves it; any training changes them.
"""

import hashlib
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..utils.notices import say_once
from .source_name import stored_source
from .weights import spread_values

SAMPLES = 64  # values of each weight in the fingerprint
STABLE_SHARE = 0.8  # docs/sinks.md: 0.9 diverges
COST_OF_SHARE_1 = (  # docs/sinks.md
    " With memory_share=1, SmolLM2-135M in segments of 256 costs 0.92 nats a token above full attention with a sink "
    "and 1.40 without, and diverges after about eight segments: memory_share=0.2 is the default."
)


def diverges(config: Any) -> bool:
    """Returns whether an untrained memory is so near to all of each layer's output that it may feed on itself."""
    return min(config.memory_shares) > STABLE_SHARE


def mark_untrained(model: Any) -> None:
    """Notes that the model has the weights of a stock checkpoint; warns if it may diverge."""
    model.config.folded_weights = _fingerprint(model)
    if diverges(model.config):
        say_once(_warning(model.config))


def warn_if_untrained(model: Any, num_tokens: int) -> None:
    """Warns, once for each checkpoint, if a model reads `num_tokens` tokens with a memory that was never trained."""
    config = model.config
    if getattr(config, "folded_weights", None) is None or num_tokens <= config.segment_length:
        return
    found = _fingerprint(model)
    if found not in (None, config.folded_weights):
        config.folded_weights = None
    elif found and any(config.memory_shares):  # Transformer-XL's memory is what the weights expect
        say_once(_warning(config))


def _warning(config: Any) -> str:
    name = stored_source(config.name_or_path)
    line = (
        f"{name!r} is folded and its memory is not trained: text beyond a segment of {config.segment_length} tokens "
        "costs more than with full attention. condense train heal trains it."
    )
    return line + (COST_OF_SHARE_1 if diverges(config) else "")


def _fingerprint(model: Any) -> str | None:
    """Returns a hash of some values of each weight, the same in float32 and bfloat16; None if weights are elsewhere."""
    digest = hashlib.sha256()
    for parameter in model.base_model.parameters():
        if parameter.is_meta or not parameter.numel():
            return None
        if parameter.is_floating_point() and not is_traceable_wrapper_subclass(parameter):
            values = spread_values(parameter.detach(), SAMPLES).to(torch.bfloat16).cpu()
            digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
