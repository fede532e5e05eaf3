"""Steers with the same control at the same depth as the flow, in other ways.

Axes: B rows, T tokens, D hidden size, C components of the control.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .readings import inputs_of
from .words import Ids


class Intervention(nn.Module):
    """H (1 + u G) + u V after a layer: FiLM, or only a bias vector if `scales` is off. It starts as the identity."""

    def __init__(self, hidden_size: int, control_size: int = 1, scales: bool = False):
        super().__init__()
        self.shift_CD = nn.Parameter(torch.zeros(control_size, hidden_size))
        self.scale_CD = nn.Parameter(torch.zeros(control_size, hidden_size)) if scales else None

    def forward(self, hidden_BTD: torch.Tensor, control_BC: torch.Tensor) -> torch.Tensor:
        control_B1C = control_BC.to(hidden_BTD)[:, None]
        shift_B1D = control_B1C @ self.shift_CD
        if self.scale_CD is None:
            return hidden_BTD + shift_B1D
        return hidden_BTD * (1 + control_B1C @ self.scale_CD) + shift_B1D


class Steered(nn.Module):
    """A member of the decoder stack with an intervention on its output; the member itself sees no control."""

    def __init__(self, layer: nn.Module, intervention: Intervention):
        super().__init__()
        self.layer, self.intervention = layer, intervention

    def forward(self, hidden_BTD: torch.Tensor, *arguments: Any, control: torch.Tensor | None = None, **options: Any):
        output_BTD = self.layer(hidden_BTD, *arguments, **options)
        return output_BTD if control is None else self.intervention(output_BTD, control)


def intervene(model: Any, position: int, intervention: Intervention) -> Any:
    """Puts the intervention after member `position` of a GPT-2's stack; returns the model."""
    model.transformer.h[position] = Steered(model.transformer.h[position], intervention)
    return model


def difference_of_means(model: Any, position: int, positive: Sequence[Ids], negative: Sequence[Ids]) -> torch.Tensor:
    """Returns the mean output [D] of a member of the stack at last tokens: of positive texts minus negative ones."""
    after = model.transformer.h[position + 1]
    positive_D, negative_D = (
        torch.stack([states_TD[-1] for states_TD in inputs_of(model, after, texts)]).mean(0)
        for texts in (positive, negative)
    )
    return positive_D - negative_D
