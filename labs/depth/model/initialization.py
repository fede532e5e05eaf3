"""Fits a field to the hidden states of the layers that its block replaces, and measures the fit.

Axes: B rows, N tokens of a row, n points (tokens), M width of an MLP field, D hidden size, L layers.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch

from condense.modeling import CondenseForCausalLM
from condense.utils.choices import check_choice

from .block import DepthBlock
from .fields import MLPField

ROWS_PER_CALL = 8
POINTS_PER_CALL = 4096


class LinearFit:
    """Fits targets [n, D] on features [n, M] and a constant by least squares, from sums over all points in float64."""

    def __init__(self) -> None:
        self.count, self.sums = 0, [torch.zeros(())] * 4  # of features, targets, and their products with features

    def add(self, features_nM: torch.Tensor, targets_nD: torch.Tensor) -> None:
        features, targets = features_nM.double(), targets_nD.double()
        new = (features.sum(0), targets.sum(0), features.T @ features, features.T @ targets)
        self.count += len(features)
        self.sums = [value + total.to(value) for value, total in zip(new, self.sums, strict=True)]

    def solve(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights [M, D] and constant [D].

        The penalty on squared weights is `ridge` times the mean variance of a feature; the constant is free.
        """
        mean_M, mean_D, gram_MM, products_MD = (total.cpu() / self.count for total in self.sums)
        gram_MM, products_MD = gram_MM - mean_M[:, None] * mean_M, products_MD - mean_M[:, None] * mean_D
        penalty = ridge * gram_MM.diagonal().mean()
        # Singular if a feature is constant, or if there are fewer points than features.
        penalised_MM = gram_MM + penalty * torch.eye(len(gram_MM), dtype=gram_MM.dtype)
        weights_MD = torch.linalg.lstsq(penalised_MM, products_MD, driver="gelsd").solution
        return weights_MD, mean_D - mean_M @ weights_MD


@torch.no_grad()
def fit_field(
    model: CondenseForCausalLM,
    original: CondenseForCausalLM,
    ids_BN: torch.Tensor,
    path: Literal["straight", "layers"] = "straight",
    gain: float | None = 1.0,
    ridge: float = 1e-6,
    seed: int = 0,
) -> None:
    """Fits the MLP field of `model`'s depth block to the layers of `original` that the block replaces.

    `ids_BN` are texts without padding. `original` reads them; its hidden states H_0 ... H_k before and after the k
    replaced layers define the target flow. The path `"straight"` goes from H_0 to H_k on a line; `"layers"` passes each
    H_i at tau = i / k. At the depths of the solver's `steps`, W2 and b2 are the least-squares fit of the slope dH/dtau,
    divided by alpha, on softplus(W1 norm(H) + b1). With the Euler method a perfect fit gives H_k. The control is set to
    0.

    W1 and b1 are redrawn from `seed` so that softplus inputs have the standard deviation `gain`; None keeps them.
    `ridge` is relative to the mean variance of a feature.

    Changes the block's field; `missed_share` measures the fit. Raises `ValueError` for a model that is not folded or
    lacks an MLP field, for an `original` with different layers or segments, and for values out of range.
    """
    block = _check_models(model, original)
    field, settings = _check_settings(block, path, gain, ridge), block.settings
    if gain is not None:
        _draw_features(field, gain, seed)
    first, fit = settings.position, LinearFit()
    for rows_BN in ids_BN.split(ROWS_PER_CALL):
        states_LnD = layer_states(original, rows_BN, first, first + settings.num_replaced)
        knots = states_LnD if path == "layers" else states_LnD[[0, -1]]
        for step in range(settings.steps):
            tau = step / settings.steps
            state_nD, slope_nD = _on_path(knots, tau)
            control_1C = state_nD.new_zeros(1, settings.control_size)
            points = zip(state_nD.split(POINTS_PER_CALL), slope_nD.split(POINTS_PER_CALL), strict=True)
            for some_nD, slopes_nD in points:
                fit.add(field.features(tau, some_nD, control_1C), slopes_nD / block.alpha)
    weights_MD, constant_D = fit.solve(ridge)
    field.down_proj.weight.copy_(weights_MD.T)
    field.down_proj.bias.copy_(constant_D)


@torch.no_grad()
def missed_share(model: CondenseForCausalLM, original: CondenseForCausalLM, ids_BN: torch.Tensor) -> float:
    """Returns the share of the change by `original`'s replaced layers that the flow of `model` misses.

    Both models read `ids_BN`, texts without padding; do not use the texts of the fit. The result is the mean square of
    H(1) - H_k, divided by the variance over tokens of the change H_k - H_0. 0 is the layers' output; 1 is only as good
    as the mean change. It is comparable across fields, solvers and paths. Raises `ValueError` for models that are not
    folded, a model without a depth block, and an `original` with different layers or segments.
    """
    settings = _check_models(model, original).settings
    first, last = settings.position, settings.position + settings.num_replaced
    count, errors, squares, sum_D = 0, 0.0, 0.0, torch.zeros(())
    for rows_BN in ids_BN.split(ROWS_PER_CALL):
        start_nD, *_, expected_nD = layer_states(original, rows_BN, first, last).double()
        _, end_nD = layer_states(model, rows_BN, first, first + 1).double()
        change_nD = expected_nD - start_nD
        errors += float((end_nD - expected_nD).square().sum())
        squares += float(change_nD.square().sum())
        count, sum_D = count + len(change_nD), sum_D + change_nD.sum(0).cpu()
    variance = squares - float(sum_D.square().sum()) / count
    if not variance > 0:
        raise ValueError("the replaced layers change all tokens alike, so the variance is 0: pass more texts.")
    return errors / variance


@torch.no_grad()
def layer_states(model: CondenseForCausalLM, ids_BN: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Returns hidden states [L + 1, n, D] of all tokens before layer `first` and after each layer up to `end` - 1."""
    layers: Sequence[Any] = list(model.model.layers)[first:end]
    recorded: list[list[torch.Tensor]] = [[] for _ in range(len(layers) + 1)]

    def record_input(module: Any, inputs: tuple) -> None:
        if not inputs[2].is_sink:
            recorded[0].append(inputs[0].flatten(0, -2))

    def record_output(states: list[torch.Tensor], module: Any, inputs: tuple, output: tuple) -> None:
        if not inputs[2].is_sink:
            states.append(output[0].flatten(0, -2))

    with ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(record_input))
        for layer, states in zip(layers, recorded[1:], strict=True):
            hooks.enter_context(layer.register_forward_hook(partial(record_output, states)))
        model(ids_BN.to(model.device), use_cache=False, logits_to_keep=1)
    return torch.stack([torch.cat(states) for states in recorded])


def _on_path(knots_LnD: torch.Tensor, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns state and slope, at depth tau < 1, of the path through equally spaced knots."""
    count = len(knots_LnD) - 1
    number = int(tau * count + 1e-9)
    step_nD = knots_LnD[number + 1] - knots_LnD[number]
    return knots_LnD[number] + (tau * count - number) * step_nD, count * step_nD


def _draw_features(field: MLPField, gain: float, seed: int) -> None:
    """Draws W1 and b1 so that softplus receives varied values of size `gain` and both signs."""
    generator, width = torch.Generator().manual_seed(seed), field.up_proj.weight.shape[1]
    drawn = {field.up_proj.weight: gain * width**-0.5, field.up_proj.bias: gain}  # norm(H) has a mean square of 1
    if field.tau_proj is not None:
        drawn[field.tau_proj.weight] = gain
    for weight, scale in drawn.items():
        weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def _check_models(model: CondenseForCausalLM, original: CondenseForCausalLM) -> DepthBlock:
    """Returns the model's block; `original` has the layers that it replaces."""
    blocks = [layer for layer in model.model.layers if isinstance(layer, DepthBlock)]
    if not blocks:
        raise ValueError("the model does not have a depth block to fit: make one with convert_to_depth.")
    (block,) = blocks
    expected = len(model.model.layers) - 1 + block.settings.num_replaced
    if original.config.depth is not None or len(original.model.layers) != expected:
        raise ValueError(
            f"original: a model of {len(original.model.layers)} layers: pass the model of {expected} layers that "
            "convert_to_depth changed, a copy made before."
        )
    length, own = original.config.segment_length, model.config.segment_length
    if length != own:  # states are in the order of segments
        raise ValueError(f"original: segments of {length} tokens, and the model's have {own}: load it with the same.")
    return block


def _check_settings(block: DepthBlock, path: str, gain: float | None, ridge: float) -> MLPField:
    """Returns the block's field if these settings can fit it."""
    if not isinstance(block.field, MLPField):
        raise ValueError(
            f"the field {block.settings.field!r} is not linear in its last weights: fit one with field='mlp'; a field "
            "'layer' begins with the weights of the first replaced layer."
        )
    check_choice("path", path, ("straight", "layers"))
    if not (gain is None or 0 < gain < math.inf) or not 0 <= ridge < math.inf:
        raise ValueError(f"gain={gain!r}, ridge={ridge!r}: pass a gain above 0, or None to keep W1, and a ridge >= 0.")
    if not float(block.alpha.abs()):
        raise ValueError("alpha=0: the flow stands still whatever its field is: pass alpha=0.1 to convert_to_depth.")
    return block.field
