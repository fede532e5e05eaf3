"""Model FLOPs utilisation (MFU): the share of a device's peak that the model's own operations reach."""

from collections.abc import Callable
from typing import Any

import torch

from ..recipe import Recipe
from ..recipe.objectives import NextToken
from .activations import KEPT_BY_KIND
from .devices import peak_flops
from .operations import text_flops
from .passes import weights_of


def seconds_at_peak(recipe: Recipe, config: Any) -> Callable[[int], float] | None:
    """The least time that this process's GPU takes for a text of this many tokens, forward and backward.

    MFU is its quotient with the time that was taken. None on a CPU, in float32, where the GPU or the kind of model is
    not known, for a depth block with an adaptive solver, and for objectives with passes of their own.
    """
    if not isinstance(recipe.objective, NextToken):
        return None
    if not torch.cuda.is_available() or recipe.dtype != "bfloat16" or recipe.model.kind not in KEPT_BY_KIND:
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    if peak is None:
        return None
    try:
        flops = text_flops(config, recipe.model.tokens_per_segment(config), weights_of(config, recipe))
    except ValueError:  # evaluations of an adaptive solver
        return None
    return lambda tokens: flops(tokens) / peak
