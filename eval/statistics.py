"""Confidence intervals of shares and means."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

RESAMPLED_AT_ONCE = 2**16  # values, which fit in a cache


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Returns Wilson's 95 % score interval of a share. At 0 % and 100 % it is still valid, unlike the normal one."""
    if total < 1 or not 0 <= correct <= total:
        raise ValueError(f"{correct} correct of {total}: a share needs 0 <= correct <= total and total >= 1.")
    found = stats.binomtest(correct, total).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def bootstrap(values: Sequence[float], samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % bootstrap percentile interval of the mean."""
    if not len(values):
        raise ValueError("there are no values to average.")
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
