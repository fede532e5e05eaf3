"""Builds the models of the experiments: transformers' GPT-2, with blocks in place of its middle layers.

Axes: x any size, D hidden size, C components of the control.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from ..model import DepthSettings, MLPField
from ..model.fields import Tau, field_size_for
from ..model.stock import StockDepthBlock

ARMS = ("baseline", "hybrid", "twin", "wide_twin", "shorter", "alpha_fixed", "alpha_one")
TWINS = ("twin", "wide_twin")
TWIN_STEPS = 4
PAPER_FIELD_PARAMETERS = 857_344


@dataclass(frozen=True)
class Size:
    """The size of the models and of their training.

    A block replaces layers `replaced[0]` to `replaced[1] - 1`; its field is an MLP of width `field_size`.
    """

    width: int
    layers: int
    heads: int
    vocab_size: int
    positions: int
    steps: int
    batch: int
    learning_rate: float
    field_size: int
    replaced: tuple[int, int] = (2, 4)
    control_size: int = 1


# The paper does not give its field's width: this one comes closest to its number of parameters.
PAPER = Size(
    width=256, layers=6, heads=4, vocab_size=50_257, positions=128, steps=500, batch=4, learning_rate=1e-4,
    field_size=field_size_for(PAPER_FIELD_PARAMETERS, 256, num_inputs=256 + 1, norm_parameters=2 * 256),
)  # fmt: skip
SMALL = Size(
    width=32, layers=6, heads=4, vocab_size=1_024, positions=32, steps=12, batch=4, learning_rate=3e-3, field_size=64
)


class StepsField(nn.Module):
    """A field that is constant in tau between equally spaced depths.

    Its Euler steps are residual layers with their own weights.
    Used by `twin` and `wide_twin`, the discrete models compared with the flow. Raises `ValueError` for a solver that
    chooses each token's steps.
    """

    def __init__(self, fields: Sequence[nn.Module]):
        super().__init__()
        self.fields = nn.ModuleList(fields)

    def forward(self, tau: Tau, hidden_xD: torch.Tensor, control_xC: torch.Tensor | None) -> torch.Tensor:
        if isinstance(tau, torch.Tensor):
            raise ValueError("a twin takes steps of equal length: choose the solver euler.")
        number = int(tau * len(self.fields) + 1e-6)
        return self.fields[min(number, len(self.fields) - 1)](tau, hidden_xD, control_xC)


def build(arm: str, size: Size, seed: int) -> GPT2LMHeadModel:
    """Builds a model with random weights; layers common to all arms get equal weights for equal seeds.

    `hybrid` has a flow in place of the replaced layers. In `alpha_fixed` and `alpha_one` its scale stays at 0.1 and at
    1. `twin` has as many residual MLP steps as the flow has evaluations. Each has its own weights; together they have
    as many as the flow. In `wide_twin` each step is as wide as the flow's field. `shorter` has neither the layers nor a
    block. Raises `ValueError` for an unknown arm.
    """
    if arm not in ARMS:
        raise ValueError(f"model {arm!r} is unknown: choose one of {', '.join(ARMS)}.")
    config = GPT2Config(
        vocab_size=size.vocab_size, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        n_positions=size.positions, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        if arm != "baseline":
            first, end = size.replaced
            blocks = nn.ModuleList([] if arm == "shorter" else [_block(arm, size)])
            for module in blocks.modules():
                model._init_weights(module)
            layers: Any = model.transformer.h
            model.transformer.h = nn.ModuleList([*layers[:first], *blocks, *layers[end:]])
    return model


def _block(arm: str, size: Size) -> StockDepthBlock:
    first, end = size.replaced
    settings = DepthSettings(
        position=first, num_replaced=end - first, field_size=size.field_size, control_size=size.control_size,
        alpha=1.0 if arm == "alpha_one" else 0.1, learn_alpha=not arm.startswith("alpha_"), steps=TWIN_STEPS,
    )  # fmt: skip
    field = _field(size, size.field_size)
    if arm not in TWINS:
        return StockDepthBlock(field, settings)
    share = num_parameters(field) // (TWIN_STEPS if arm == "twin" else 1)
    width = field_size_for(share, size.width, size.width + size.control_size, norm_parameters=2 * size.width)
    return StockDepthBlock(StepsField([_field(size, width) for _ in range(TWIN_STEPS)]), settings)


def _field(size: Size, field_size: int) -> MLPField:
    return MLPField(nn.LayerNorm(size.width), size.width, field_size, size.control_size)


def block_of(model: nn.Module) -> StockDepthBlock | None:
    """Returns the block in place of layers; None in `baseline` and `shorter`."""
    return next((module for module in model.modules() if isinstance(module, StockDepthBlock)), None)


def block_in(model: nn.Module) -> StockDepthBlock:
    """Returns the block of a model that has one."""
    block = block_of(model)
    assert block is not None
    return block


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
