"""The solvers against torchdiffeq, against exact solutions, and row by row."""

from math import log2

import pytest
import torch
from torchdiffeq import odeint

from condense.labs.depth.model import DepthSettings
from condense.labs.depth.model.solvers import num_fixed_evaluations, solve_adaptive, solve_fixed

FIXED = ("euler", "midpoint", "rk4")
ADAPTIVE = ("dopri5", "adaptive_heun")
D = 5


def settings(**changes):
    return DepthSettings(**{"position": 0, "num_replaced": 1, "rtol": 1e-3, "atol": 1e-5, **changes})


def matrix(seed=0):
    return torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Counted:
    """A field and its number of calls."""

    def __init__(self, field):
        self.field, self.calls = field, 0

    def __call__(self, tau, state):
        self.calls += 1
        return self.field(tau, state)


def bent(tau, state_xD):
    """Not linear, and different at each tau."""
    return torch.sin(state_xD @ matrix().T + 3 * tau) - tau * state_xD


@pytest.mark.parametrize("solver", FIXED)
def test_fixed_steps_are_torchdiffeqs_step_for_step(solver):
    start = matrix(1)
    ends = torch.linspace(0, 1, 7 + 1, dtype=torch.float64)
    field = Counted(bent)
    end = solve_fixed(field, start, solver, 7)
    torch.testing.assert_close(end, odeint(bent, start, ends, method=solver)[-1], rtol=1e-13, atol=1e-13)
    assert field.calls == num_fixed_evaluations(settings(solver=solver, steps=7))


@pytest.mark.parametrize(("solver", "order"), list(zip(FIXED, (1, 2, 4), strict=True)))
def test_error_against_the_matrix_exponential_falls_with_the_order(solver, order):
    a, start = matrix(), matrix(1)
    exact = start @ torch.linalg.matrix_exp(a).T
    errors = [
        (solve_fixed(lambda tau, state: state @ a.T, start, solver, steps) - exact).norm().item() for steps in (64, 128)
    ]
    assert log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_adaptive_solvers_reach_their_tolerance_and_count_their_calls(solver):
    a, start = matrix(), matrix(1)
    exact = start @ torch.linalg.matrix_exp(a).T
    errors, evaluations = [], []
    for rtol in (1e-2, 1e-4):
        tolerances = settings(solver=solver, rtol=rtol, atol=rtol / 10)
        end, counts = solve_adaptive(lambda tau, state: state @ a.T, start, tolerances)
        errors.append((end - exact).norm().item() / exact.norm().item())
        evaluations.append(counts.double().mean().item())
        assert errors[-1] < 3 * rtol
    assert errors[1] < errors[0] / 10 and evaluations[1] > evaluations[0]
    field = Counted(bent)
    _, counts = solve_adaptive(field, start[:1], settings(solver=solver))
    assert counts.tolist() == [field.calls]


def stretched(scale_n1):
    """Samples move at their own speeds."""
    return lambda tau, state_nD: scale_n1 * torch.sin(3 * state_nD @ matrix().T + tau)


SPEEDS = torch.tensor([[0.0], [0.1], [1.0], [4.0]], dtype=torch.float64)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_a_sample_does_not_depend_on_its_neighbours(solver):
    """Neither its answer, nor its evaluations, nor its gradient: they end at different times."""
    start = matrix(1)[:4].requires_grad_()
    together, counts = solve_adaptive(stretched(SPEEDS), start, settings(solver=solver))
    (gradient,) = torch.autograd.grad(together.square().sum(), start)
    assert len(set(counts.tolist())) == 4
    for n in range(4):
        own = start[n : n + 1].detach().requires_grad_()
        alone, count = solve_adaptive(stretched(SPEEDS[n : n + 1]), own, settings(solver=solver))
        torch.testing.assert_close(together[n : n + 1], alone, rtol=1e-10, atol=1e-12)
        assert counts[n] == count[0]
        (own_gradient,) = torch.autograd.grad(alone.square().sum(), own)
        torch.testing.assert_close(gradient[n : n + 1], own_gradient, rtol=1e-8, atol=1e-10)


def test_in_torchdiffeq_a_sample_depends_on_its_neighbours():
    """Why the adaptive solvers are torchode's."""
    start, ends = matrix(1)[:4], torch.tensor([0.0, 1.0], dtype=torch.float64)
    together, alone = Counted(stretched(SPEEDS)), Counted(stretched(SPEEDS[1:2]))
    tolerances = {"rtol": 1e-3, "atol": 1e-5, "method": "dopri5"}
    difference = (
        odeint(together, start, ends, **tolerances)[-1, 1] - odeint(alone, start[1:2], ends, **tolerances)[-1, 0]
    )
    assert difference.abs().max() > 1e-9 and together.calls > 2 * alone.calls


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_the_gradient_is_that_of_the_exact_solution_within_the_tolerance(solver):
    a, start = matrix().requires_grad_(), matrix(1)
    exact = (start @ torch.linalg.matrix_exp(a).T).square().sum()
    (expected,) = torch.autograd.grad(exact, a)
    end, _ = solve_adaptive(lambda tau, state: state @ a.T, start, settings(solver=solver, rtol=1e-4, atol=1e-6))
    (gradient,) = torch.autograd.grad(end.square().sum(), a)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("solver", ADAPTIVE)
def test_the_number_of_evaluations_has_an_end(solver):
    """A sample may take as many as are allowed, and no more."""
    start = matrix(1)[:2]
    needed = solve_adaptive(bent, start, settings(solver=solver))[1].max().item()
    allowed = settings(solver=solver, max_evaluations=needed)
    assert solve_adaptive(bent, start, allowed)[1].max() == needed
    field = Counted(bent)
    remedy = f"max_evaluations={needed - 1} .*'mlp' at rtol=0.001, atol=1e-05 for . of 2 tokens: raise the tolerances"
    with pytest.raises(ValueError, match=f"{solver} needs more than {remedy}"):
        solve_adaptive(field, start, settings(solver=solver, max_evaluations=needed - 1))
    assert field.calls <= needed
