"""Model FLOPs utilisation (MFU): the share of a device's peak that the model's own operations reach."""

from collections.abc import Callable
from typing import Any

import torch

from ..recipe import Recipe
from ..recipe.objectives import NextToken
from .devices import peak_flops
from .operations import text_flops
from .passes import PLANNED_KINDS, weights_of


def seconds_at_peak(recipe: Recipe, config: Any) -> Callable[[int], float] | None:
    """Returns a function from a text's tokens to the least time of this process's GPU for them, forward and backward.

    MFU is this time divided by the time taken. Returns None on a CPU, in float32, for unknown GPUs and kinds of models,
    for a depth block with an adaptive solver, and for objectives with passes of their own.
    """
    is_counted = isinstance(recipe.objective, NextToken) and recipe.model.kind in PLANNED_KINDS
    if not is_counted or recipe.dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    if peak is None:
        return None
    try:
        flops = text_flops(config, recipe.model.tokens_per_segment(config), weights_of(config, recipe))
    except ValueError:  # evaluations of an adaptive solver
        return None
    return lambda tokens: flops(tokens) / peak
