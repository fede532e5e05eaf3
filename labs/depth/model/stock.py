"""Implements the depth block of a stock transformers decoder stack, such as GPT-2's or a Llama's."""

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from condense.control import check_control, zero_control

from .block import DepthFlow


class StockDepthBlock(DepthFlow, GradientCheckpointingLayer):
    """Takes the place of layers in `model.layers` or `transformer.h`.

    The models pass keyword arguments on to their layers: the block receives the control from `model(ids,
    control=control)`, as [B, C] or [B, T, C]; zeros by default. `function_evaluations` counts the last call: one number
    for all tokens, or [B, T].

    Keep layer 0: a stock cache counts its tokens there. A stock model's `generate` refuses a control, because its
    forward pass does not name it; `DepthLlamaForCausalLM` accepts it.

    Raises `ValueError` for a control that does not fit.

    Axes: B rows, T tokens, D hidden size, C components of the control.
    """

    function_evaluations: int | torch.Tensor = 0

    def forward(self, hidden_BTD: torch.Tensor, *unused, control: torch.Tensor | None = None, **also_unused):
        size = self.settings.control_size
        if control is not None:
            check_control(size, control, (hidden_BTD.shape[0], hidden_BTD.shape[1]))
        elif size:
            control = zero_control(size, hidden_BTD, hidden_BTD)
        if control is not None:
            control = control.to(hidden_BTD)
            control = control[:, None] if control.dim() == 2 else control
        solution = self.flow(hidden_BTD, control)
        self.function_evaluations = solution.num_evaluations
        return solution.end_xD
