"""Defines vector fields, which a depth block integrates over the depth tau from 0 to 1.

Axes: D hidden size, C components of the control, x any size.
"""

import torch
import torch.nn.functional as F
from torch import nn

Tau = float | torch.Tensor  # one depth for all tokens (a number or a scalar tensor), or [x, 1], one for each


class MLPField(nn.Module):
    """F(H, tau, u) = W2 softplus(W1 [norm(H) ; u ; tau] + b1) + b2 for each token; tau only with `uses_tau`.

    W1 is stored in parts by input, so a text's control is multiplied once for all its tokens.
    """

    def __init__(self, norm: nn.Module, hidden_size: int, field_size: int, control_size: int, uses_tau: bool = False):
        super().__init__()
        self.norm = norm
        self.up_proj = nn.Linear(hidden_size, field_size)
        self.control_proj = nn.Linear(control_size, field_size, bias=False) if control_size else None
        self.tau_proj = nn.Linear(1, field_size, bias=False) if uses_tau else None
        self.down_proj = nn.Linear(field_size, hidden_size)

    def forward(self, tau: Tau, hidden_xD: torch.Tensor, control_xC: torch.Tensor | None) -> torch.Tensor:
        return self.down_proj(self.features(tau, hidden_xD, control_xC))

    def features(self, tau: Tau, hidden_xD: torch.Tensor, control_xC: torch.Tensor | None) -> torch.Tensor:
        """Returns the softplus, the inputs of W2."""
        sum_xM = self.up_proj(self.norm(hidden_xD))
        if self.control_proj is not None:
            sum_xM = sum_xM + self.control_proj(control_xC)
        if self.tau_proj is not None:
            tau_x1 = tau.reshape(-1, 1) if isinstance(tau, torch.Tensor) else hidden_xD.new_full((1, 1), tau)
            sum_xM = sum_xM + self.tau_proj(tau_x1.to(hidden_xD.dtype))
        return F.softplus(sum_xM)


def field_size_for(num_parameters: int, hidden_size: int, num_inputs: int, norm_parameters: int) -> int:
    """Returns the width that brings an `MLPField` closest to `num_parameters` parameters.

    `num_inputs` is the number of columns of W1: hidden size, control and tau.
    """
    width = (num_parameters - norm_parameters - hidden_size) / (num_inputs + 1 + hidden_size)
    return max(1, round(width))
