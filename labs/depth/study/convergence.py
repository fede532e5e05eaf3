"""Measures the order of convergence of each solver: how its error falls with its steps, or with its tolerance.

The reference is an exact solution in float64: the matrix exponential for a linear field, many steps of rk4 for a
trained one. Errors are relative to the displacement.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..model.settings import ADAPTIVE_SOLVERS, FIXED_SOLVERS
from ..model.solvers import TABLEAUS
from .readings import Reading

ORDERS = {"euler": 1, "midpoint": 2, "rk4": 4}  # in theory
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FITTED_FROM = 4  # steps; with fewer, errors do not follow the order yet
ROUNDING = 1e-12  # relative; smaller errors are float64 rounding
TOLERANCES = {"dopri5": [10.0**-n for n in range(1, 10)], "adaptive_heun": [10.0**-n for n in range(1, 7)]}
LINEAR_SIZE = 8  # size of the linear field


def linear_problem(seed: int) -> tuple[Reading, torch.Tensor, torch.Tensor]:
    """Returns a linear field dH/dtau = A H with start and exact end [1, n, D]; A is random, with spectral norm 1."""
    generator = torch.Generator().manual_seed(seed)
    matrix, start_1nD = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((LINEAR_SIZE, LINEAR_SIZE), (1, 16, LINEAR_SIZE))
    )
    matrix = matrix / torch.linalg.matrix_norm(matrix, 2)
    reading = Reading((lambda tau, state_nD: state_nD @ matrix.T,), 4, 1)
    return reading, start_1nD, start_1nD @ torch.linalg.matrix_exp(matrix).T


@torch.no_grad()
def converge(reading: Reading, start: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """Returns errors by solver: for fixed ones with the fitted order, for adaptive ones with mean evaluations."""

    def error(end: torch.Tensor) -> float:
        return float((end - exact).norm() / (exact - start).norm())

    found: dict[str, Any] = {}
    for solver in FIXED_SOLVERS:
        errors = [error(reading.fixed(start, solver, steps)) for steps in STEPS]
        evaluations = [steps * len(TABLEAUS[solver].c) for steps in STEPS]
        found[solver] = {"evaluations": evaluations, "errors": errors, "order": order(STEPS, errors)}
    for solver in ADAPTIVE_SOLVERS:
        ends, counts = zip(*(reading.adaptive(start, solver, at) for at in TOLERANCES[solver]), strict=True)
        evaluations = [float(evaluations_n.double().mean()) for evaluations_n in counts]
        tolerances, errors = list(TOLERANCES[solver]), list(map(error, ends))
        found[solver] = {"tolerances": tolerances, "evaluations": evaluations, "errors": errors}
    return found


def order(steps: Sequence[int], errors: Sequence[float]) -> float | None:
    """Fits the slope of -log(error) on log(steps) by least squares; None if fewer than two errors exceed rounding."""
    points = [(n, e) for n, e in zip(steps, errors, strict=True) if n >= FITTED_FROM and e > ROUNDING]
    if len(points) < 2:
        return None
    log_steps, log_errors = np.log(np.asarray(points)).T
    return float(-np.polyfit(log_steps, log_errors, 1)[0])
