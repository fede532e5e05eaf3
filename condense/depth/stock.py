"""The depth block of a stock decoder stack of transformers, such as GPT-2's or a Llama's."""

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from .block import DepthFlow


class StockDepthBlock(DepthFlow, GradientCheckpointingLayer):
    """Takes the place of layers in `model.layers` or `transformer.h`.

    The models pass keyword arguments on to their layers: `model(ids, control=control)` reaches the block, as [B, C] or
    [B, T, C]; zeros where none is given. `function_evaluations` are those of the last call: one number for all tokens,
    or [B, T].

    Axes: B rows, T tokens, D hidden size, C components of the control.
    """

    function_evaluations: int | torch.Tensor = 0

    def forward(self, hidden_BTD: torch.Tensor, *unused, control: torch.Tensor | None = None, **also_unused):
        size = self.settings.control_size
        if control is None and size:
            control = hidden_BTD.new_zeros(len(hidden_BTD), size)
        if control is not None:
            control = control.to(hidden_BTD)
            control = control[:, None] if control.dim() == 2 else control
        solution = self.flow(hidden_BTD, control)
        self.function_evaluations = solution.num_evaluations
        return solution.end_xD
