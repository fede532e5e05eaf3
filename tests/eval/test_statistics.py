"""Intervals against worked cases and against what they promise."""

import numpy as np
import pytest

from condense.eval.statistics import bootstrap, wilson

from ..refusals import assert_refused

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (10, 10, 0.7225, 1.0),  # Brown, Cai and DasGupta's closed form: n / (n + z^2)
        (0, 10, 0.0, 0.2775),
        (1, 2, 0.0945, 0.9055),
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), method 3
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilson(correct, total, low, high):
    assert wilson(correct, total) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("correct", "total"), [(3, 2), (0, 0), (-1, 4)])
def test_a_share_of_nothing_is_named(correct, total):
    assert_refused(f"{correct} correct of {total}", wilson, correct, total)


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    generator, covered = np.random.default_rng(0), 0
    for trial in range(300):
        low, high = bootstrap(generator.exponential(1.0, 60), samples=300, seed=trial)
        covered += low <= 1.0 <= high
    assert 0.89 <= covered / 300 <= 0.98


@pytest.mark.parametrize("number", [1, 14, 1001])
def test_bootstrap_is_that_of_one_resample_after_another(number, monkeypatch):
    monkeypatch.setattr("condense.eval.statistics.RESAMPLED_AT_ONCE", 3000)
    values, generator = np.random.default_rng(number).random(number), np.random.default_rng(0)
    means = [generator.choice(values, number).mean() for _ in range(1000)]
    assert bootstrap(values) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), rel=1e-12)


def test_bootstrap_by_hand():
    assert bootstrap([2.0, 2.0, 2.0]) == (2.0, 2.0)
    low, high = bootstrap([0.0, 1.0])  # means of 0, 1/2 and 1 with chances of 1/4, 1/2, 1/4
    assert (low, high) == (0.0, 1.0)
    assert bootstrap([1.0, 2.0, 5.0], seed=3) == bootstrap([1.0, 2.0, 5.0], seed=3)
    assert_refused("no values", bootstrap, [])
