"""Reads a model's middle layers or their replacement as a flow, which any solver can solve.

A flow is one field for the whole depth. A discrete network of P blocks can be read as one too: block p is the field
from tau = p/P to (p+1)/P, constant in tau, and P Euler steps compute the network itself. A test of solvers should find
this "ResNet in disguise".

Axes: B texts, T tokens, D hidden size, n samples, X a sample's content: a token's D, or a text's T x D if the blocks
have attention.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..model import DepthSettings
from ..model.settings import FIXED_SOLVERS
from ..model.solvers import Derivative, solve_adaptive, solve_fixed
from ..model.stock import StockDepthBlock
from .models import StepsField
from .pretraining import Setup, held_out_windows, spread

EXACT = 1e-9  # rtol and atol of dopri5, in float64
LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Reading:
    """Fields over equal parts of the depth, each scaled to the interval from 0 to 1, for states [n, X].

    The model itself computes `steps` Euler steps.
    """

    pieces: tuple[Derivative, ...]
    steps: int
    sample_dims: int  # of [B, T, D]: 1, a sample is a token; 2, a text

    def end(self, start_BTD: torch.Tensor, solver: str, amount: float) -> torch.Tensor:
        """Returns the end of the flow [B, T, D]; `amount` is the number of equal steps, or an adaptive tolerance."""
        if solver in FIXED_SOLVERS:
            return self.fixed(start_BTD, solver, int(amount))
        return self.adaptive(start_BTD, solver, amount)[0]

    def fixed(self, start_BTD: torch.Tensor, solver: str, steps: int) -> torch.Tensor:
        """Returns the end of the flow [B, T, D] after equal steps over the whole depth, which may miss the jumps."""
        count = len(self.pieces)

        def field(tau: float, state_nX: torch.Tensor) -> torch.Tensor:
            piece = min(int(tau * count + 1e-9), count - 1)
            return count * self.pieces[piece](tau * count - piece, state_nX)

        start_nX = start_BTD.flatten(0, 2 - self.sample_dims).flatten(1)
        return solve_fixed(field, start_nX, solver, steps).view_as(start_BTD)

    def adaptive(
        self, start_BTD: torch.Tensor, solver: str, rtol: float, atol: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the end of the flow [B, T, D] and the evaluations [n] of each sample; `atol` is `rtol` by default.

        Pieces are solved separately, so every jump of the field lies between two steps.
        """
        state_nX = start_BTD.flatten(0, 2 - self.sample_dims).flatten(1)
        evaluations_n = torch.zeros(len(state_nX), dtype=torch.long)
        settings = DepthSettings(
            position=0, num_replaced=1, solver=solver, rtol=rtol, atol=atol or rtol, max_evaluations=1_000_000
        )
        for piece in self.pieces:
            state_nX, more_n = solve_adaptive(piece, state_nX, settings)
            evaluations_n = evaluations_n + more_n
        return state_nX.view_as(start_BTD), evaluations_n

    def exact(self, start_BTD: torch.Tensor, tolerance: float = EXACT) -> torch.Tensor:
        """Returns the end of the flow [B, T, D] by dopri5, whose error is negligible at this tolerance."""
        return self.adaptive(start_BTD, "dopri5", tolerance)[0]


def read_flow(block: StockDepthBlock, control: float = 0.0) -> Reading:
    """Reads a block's flow; `control` is the value of all components for all tokens."""
    return Reading((_slope(block, block.field, control),), block.settings.steps, 1)


def read_steps(block: StockDepthBlock) -> Reading:
    """Reads the residual steps of `twin` and `wide_twin`, which have their own weights; each is a piece."""
    assert isinstance(block.field, StepsField)
    fields = list(block.field.fields)
    return Reading(tuple(_slope(block, field, 0.0, len(fields)) for field in fields), len(fields), 1)


def control_of(block: StockDepthBlock, control: float) -> torch.Tensor:
    """Returns the control [1, C] of all tokens, in the block's precision."""
    return block.alpha.detach().new_full((1, block.settings.control_size), control)


def _slope(block: StockDepthBlock, field: Any, control: float, parts: int = 1) -> Derivative:
    control_1C = control_of(block, control)
    return lambda tau, state_nD: block.alpha * field(tau, state_nD, control_1C) / parts


def read_layers(layers: Sequence[nn.Module], hidden_size: int) -> Reading:
    """Reads decoder layers of GPT-2 with their attention; each is a piece; texts must not have padding."""

    def piece(layer: nn.Module) -> Derivative:
        def update(tau: Any, state_BX: torch.Tensor) -> torch.Tensor:
            hidden_BTD = state_BX.unflatten(1, (-1, hidden_size))
            return (layer(hidden_BTD) - hidden_BTD).flatten(1)

        return update

    return Reading(tuple(map(piece, layers)), len(layers), 2)


def accurate(model: nn.Module) -> Any:
    """Returns a copy in float64."""
    return copy.deepcopy(model).double().eval()


@contextmanager
def output_of(module: nn.Module, replaced: torch.Tensor) -> Iterator[None]:
    """Makes the module return this output instead of its own."""
    with module.register_forward_hook(lambda *called: replaced):
        yield


@torch.no_grad()
def input_of(model: nn.Module, module: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Returns the hidden states [B, T, D] that the module receives."""
    seen: list[torch.Tensor] = []
    with module.register_forward_pre_hook(lambda called, given: seen.append(given[0])):
        model(input_ids=ids_BT, use_cache=False)
    return seen[0]


def inputs_of(model: Any, module: nn.Module, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns, for each text, the hidden states [T, D] that a module of the model's stack receives."""
    device = next(model.parameters()).device
    return [input_of(model.transformer, module, torch.tensor([text], device=device))[0] for text in texts]


def next_token_losses(logits_BTV: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
    """Returns losses [B, T-1] in nats: entry t is the loss of the token after t."""
    return F.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), ids_BT[:, 1:], reduction="none")


def held_out_texts(setup: Setup, count: int) -> torch.Tensor:
    """Returns at most `count` texts [B, T], evenly spread over the held-out text."""
    return spread(held_out_windows(setup), count)


def batches(ids_BT: torch.Tensor, vocab_size: int) -> Iterator[slice]:
    """Yields the texts in parts whose logits fit into memory."""
    size = max(1, LOGITS_AT_ONCE // (ids_BT.shape[1] * vocab_size))
    return (slice(first, first + size) for first in range(0, len(ids_BT), size))
