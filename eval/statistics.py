"""Confidence intervals of shares and means."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

Z = 1.959963984540054  # two-sided 95 %
RESAMPLED_AT_ONCE = 2**16  # values, which a cache holds


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share: also valid at 0 % and 100 %, where the normal interval has no width."""
    if total < 1 or not 0 <= correct <= total:
        raise ValueError(f"{correct} correct of {total}: a share needs 0 <= correct <= total and total >= 1.")
    share, spread = correct / total, Z * Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z * sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float], samples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, over resamples of the values."""
    if not len(values):
        raise ValueError("there are no values to take the mean of.")
    observed = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    most = max(1, RESAMPLED_AT_ONCE // len(observed))
    sizes = [min(most, samples - first) for first in range(0, samples, most)]
    means = [generator.choice(observed, (size, len(observed))).mean(axis=1) for size in sizes]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
