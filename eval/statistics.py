"""Confidence intervals of shares and means."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

RESAMPLED_AT_ONCE = 2**16  # values, which a cache holds


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share: also valid at 0 % and 100 %, where the normal interval has no width."""
    if total < 1 or not 0 <= correct <= total:
        raise ValueError(f"{correct} correct of {total}: a share needs 0 <= correct <= total and total >= 1.")
    found = stats.binomtest(correct, total).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def bootstrap(values: Sequence[float], samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, over resamples of the values."""
    if not len(values):
        raise ValueError("there are no values to take the mean of.")
    if len(values) == 1:
        return float(values[0]), float(values[0])
    found = stats.bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        n_resamples=samples,
        batch=max(1, RESAMPLED_AT_ONCE // len(values)),
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
