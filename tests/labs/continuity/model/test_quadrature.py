"""Weights of samples: computed by hand, summed to elapsed time, and measured by the order of one layer's error."""

from itertools import pairwise

import pytest
import torch

from condense.labs.continuity.model import Sentence, quadrature_weights
from condense.labs.continuity.model.quadrature import RULES

pytestmark = pytest.mark.unit

HIDDEN_SIZE = 5


def test_weights_of_three_samples():
    durations = torch.tensor([1.0, 0.5, 2.0]).double()
    rectangle = [[1, 0, 0], [1, 0.5, 0], [1, 0.5, 2]]
    trapezoid = [[1, 0, 0], [1.25, 0.25, 0], [1.25, 1.25, 1]]
    assert quadrature_weights(durations).tolist() == rectangle
    assert quadrature_weights(durations, "rectangle").tolist() == rectangle
    assert quadrature_weights(durations, "trapezoid").tolist() == trapezoid
    assert durations.tolist() == [1, 0.5, 2]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_samples", [1, 2, 9])
def test_weights_of_a_query_sum_to_its_time(rule, num_samples):
    durations = 0.1 + torch.rand(num_samples, generator=torch.Generator().manual_seed(0)).double()
    weights = quadrature_weights(durations, rule)
    assert weights.dtype == torch.float64 and weights.shape == (num_samples, num_samples)
    for i in range(num_samples):
        assert (weights[i, i + 1 :] == 0).all() and (weights[i, : i + 1] > 0).all()
        assert weights[i].sum().item() == pytest.approx(durations[: i + 1].sum().item(), rel=1e-12)


def test_trapezoids_integrate_a_linear_function_exactly():
    """Rectangles do not."""
    durations = torch.tensor([1.0, 0.5, 2.0, 0.25]).double()
    times = durations.cumsum(0)
    line = 3 * times - 1
    exact = 1 * line[0] + (1.5 * times[-1] ** 2 - times[-1]) - (1.5 * times[0] ** 2 - times[0])
    assert float(quadrature_weights(durations, "trapezoid")[-1] @ line) == pytest.approx(float(exact), rel=1e-12)
    assert abs(float(quadrature_weights(durations)[-1] @ line) - float(exact)) > 1


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="rule='simpson'.*rectangle, trapezoid"):
        quadrature_weights(torch.ones(3), "simpson")


def projections():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator).double() / HIDDEN_SIZE**0.5 for _ in range(3)]


def last_output(embeddings_ND, weights_N):
    query, key, value = projections()
    scores_N = (embeddings_ND @ key) @ (embeddings_ND[-1] @ query) / HIDDEN_SIZE**0.5
    weighted_N = weights_N * scores_N.exp()
    return weighted_N @ (embeddings_ND @ value) / weighted_N.sum()


def path(times_n, sentence):
    """x(t): constant up to the first time step, linear between samples after it."""
    times_N, values_ND = sentence.time_steps_N.tolist(), sentence.embeddings_ND
    rows = []
    for t in times_n.tolist():
        k = next(k for k, end in enumerate(times_N) if t <= end + 1e-12)
        before = max(k - 1, 0)
        share = 0.0 if k == 0 else (t - times_N[k - 1]) / (times_N[k] - times_N[k - 1])
        rows.append(values_ND[before] * (1 - share) + values_ND[k] * share)
    return torch.stack(rows)


def integral(sentence, steps=2000):
    """The same output by the midpoint rule on `steps` parts of each interval; the query is the last sample."""
    start, parts, weights = sentence.integration_start, [], []
    for end, duration in zip(sentence.time_steps_N, sentence.durations_N, strict=True):
        parts.append(start + (torch.arange(steps) + 0.5) * duration / steps)
        weights.append(torch.full((steps,), duration.item() / steps).double())
        start = end
    query, key, value = projections()
    values_nD, weights_n = path(torch.cat(parts), sentence), torch.cat(weights)
    scores_n = (values_nD @ key) @ (sentence.embeddings_ND[-1] @ query) / HIDDEN_SIZE**0.5
    return (weights_n * scores_n.exp()) @ (values_nD @ value) / (weights_n @ scores_n.exp())


@pytest.mark.parametrize(("rule", "order"), [("rectangle", 2), ("trapezoid", 4)])
def test_the_error_has_the_order_of_the_rule(rule, order):
    """When the density doubles, the error falls by a factor of 2 for rectangles and of 4 for trapezoids."""
    generator = torch.Generator().manual_seed(0)
    embeddings = 1.5 * torch.randn(4, HIDDEN_SIZE, generator=generator).double()
    sentence = Sentence(embeddings=embeddings, durations=[1, 0.5, 2, 0.75], integration_start=2)
    exact, errors = integral(sentence), []
    for density in (8, 16, 32, 64):
        dense = sentence.densify(density, values="linear")
        weights = quadrature_weights(dense.durations_N, rule)[-1]
        errors.append((last_output(dense.embeddings_ND, weights) - exact).norm().item())
    for coarse, fine in pairwise(errors):
        assert coarse / fine == pytest.approx(order, rel=0.1)
