"""Solves dH/dtau = f(tau, H) from tau = 0 to 1: the state at the end, and how often f was evaluated.

Fixed-step solvers are our own loops, so a saved model runs without a solver library. A field with attention counts
evaluations, because a cache stores the keys of each. The adjoint comes from torchdiffeq. Adaptive solvers come from
torchode, which chooses the steps of each sample separately. With one step for the whole batch, as in torchdiffeq, the
answer for a text would depend on its neighbours.

States are at least float32: the update of a step is small compared with the state.

Axes: n samples (tokens), D features, x any size.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .settings import FIXED_SOLVERS, DepthSettings

Derivative = Callable[[Any, torch.Tensor], torch.Tensor]  # f(tau, state); adaptive solvers pass tau [n, 1]


@dataclass(frozen=True)
class Tableau:
    """An explicit Runge-Kutta method: stage i is f(tau + c_i h, H + h sum_j a_ij k_j); the step is h sum_i b_i k_i."""

    c: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[float, ...]


TABLEAUS = {
    "euler": Tableau((0,), ((),), (1,)),
    "midpoint": Tableau((0, 1 / 2), ((), (1 / 2,)), (0, 1)),
    "rk4": Tableau((0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
}
# Evaluations per step of an adaptive solver; two more choose the first step.
EVALUATIONS_PER_STEP = {"dopri5": 6, "adaptive_heun": 2}
EVALUATIONS_TO_START = 2


class Solution(NamedTuple):
    end_xD: torch.Tensor
    num_evaluations: int | torch.Tensor  # one number for all tokens, or [x] for each


def num_fixed_evaluations(settings: DepthSettings) -> int:
    return settings.steps * len(TABLEAUS[settings.solver].c)


def solve_fixed(derivative: Derivative, start_xD: torch.Tensor, solver: str, steps: int) -> torch.Tensor:
    """Returns the state at tau = 1 after `steps` equal steps."""
    tableau, state_xD, size = TABLEAUS[solver], start_xD, 1 / steps
    for step in range(steps):
        stages: list[torch.Tensor] = []
        for c, row in zip(tableau.c, tableau.a, strict=True):
            stages.append(derivative((step + c) * size, _advance(state_xD, size, row, stages)))
        state_xD = _advance(state_xD, size, tableau.b, stages)
    return state_xD


def _advance(state_xD: torch.Tensor, size: float, weights: Sequence[float], stages: Sequence[torch.Tensor]):
    for weight, stage_xD in zip(weights, stages, strict=True):
        if weight:
            state_xD = torch.add(state_xD, stage_xD, alpha=size * weight)
    return state_xD


def solve_fixed_adjoint(
    derivative: Derivative, start_xD: torch.Tensor, solver: str, steps: int, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Solves like `solve_fixed`; the backward pass integrates the adjoint equation in as many steps, storing none.

    `parameters` are all tensors besides the start that get a gradient.
    """
    from torchdiffeq import odeint_adjoint

    grid = {"grid_constructor": lambda function, state, ends: torch.linspace(ends[0], ends[-1], steps + 1).to(ends)}
    ends = torch.tensor([0.0, 1.0], dtype=start_xD.dtype, device=start_xD.device)
    states = odeint_adjoint(
        derivative, start_xD, ends, method=solver, options=grid, adjoint_method=solver, adjoint_options=dict(grid),
        adjoint_params=tuple(parameters),
    )  # fmt: skip
    return states[-1]


def solve_adaptive(
    derivative: Derivative, start_nD: torch.Tensor, settings: DepthSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each sample's state [n, D] at tau = 1, with steps chosen by its own error, and its evaluations [n].

    Raises `ValueError` if a sample needs more than `max_evaluations`, or tolerances are below the rounding of the
    states.
    """
    import torchode

    rounding = torch.finfo(start_nD.dtype).eps
    if max(settings.rtol, settings.atol) < rounding:
        raise ValueError(
            f"rtol={settings.rtol:g} and atol={settings.atol:g} are below the rounding of {start_nD.dtype}, "
            f"{rounding:.1g}: raise one of them, or compute in float64."
        )
    term = torchode.ODETerm(lambda tau_n, state_nD: derivative(tau_n[:, None], state_nD), with_stats=False)
    method = {"dopri5": torchode.Dopri5, "adaptive_heun": torchode.Heun}[settings.solver](term)
    controller = torchode.IntegralController(atol=settings.atol, rtol=settings.rtol, term=term)
    per_step = EVALUATIONS_PER_STEP[settings.solver]
    # A sample fails on its last permitted step, even if that step completes it.
    max_steps = (settings.max_evaluations - EVALUATIONS_TO_START) // per_step + 1
    ends = [start_nD.new_full((len(start_nD),), tau) for tau in (0.0, 1.0)]
    # Step sizes are constants for the gradient: theirs is NaN for samples that end before others.
    solver = torchode.AutoDiffAdjoint(method, controller, max_steps=max_steps, backprop_through_step_size_control=False)
    solution = solver.solve(torchode.InitialValueProblem(start_nD, *ends, None))
    evaluations_n = EVALUATIONS_TO_START + per_step * solution.stats["n_steps"]
    if bool((solution.status != torchode.status_codes.SUCCESS).any()):
        raise ValueError(
            f"the solver {settings.solver} needs more than max_evaluations={settings.max_evaluations} evaluations of "
            f"the field {settings.field!r} at rtol={settings.rtol:g}, atol={settings.atol:g} for "
            f"{int((evaluations_n > settings.max_evaluations).sum())} of {len(evaluations_n)} tokens: raise the "
            "tolerances or max_evaluations, or choose a solver with fixed steps."
        )
    return solution.ys[:, -1], evaluations_n


def check_installed(settings: DepthSettings) -> None:
    """Raises `ValueError` if the solver's library is missing."""
    needed = "torchode" if settings.is_adaptive else "torchdiffeq" if settings.gradient == "adjoint" else None
    if needed is not None and importlib.util.find_spec(needed) is None:
        raise ValueError(
            f"depth: solver={settings.solver!r} with gradient={settings.gradient!r} needs the package {needed}: "
            f"pip install {needed}, or choose one of {', '.join(FIXED_SOLVERS)} with gradient='direct'."
        )
