"""The measures of the papers, on curves: probabilities of classes against a factor.

Axes: C classes, F factors.
"""

from collections.abc import Mapping, Sequence

import numpy as np

Curves = Mapping[str, Sequence[float]]


def unique_peaks(curves: Curves) -> set[str]:
    """The classes that are the likeliest at one factor or more; of equal ones, all."""
    values_CF = np.asarray(list(curves.values()), dtype=np.float64)
    tops_C = (values_CF == values_CF.max(axis=0)).any(axis=1)
    return {name for name, top in zip(curves, tops_C, strict=True) if top}


def likeliest(curves: Curves, at: int = -1) -> str:
    """The likeliest class at one factor, by default the last."""
    return max(curves, key=lambda name: curves[name][at])


FREQUENCIES = ("counterfactual", "observed", "observed_expected", "ratio", "ratio_expected")


def peak_frequencies(curves: Curves, repetitions: int) -> dict[str, float]:
    """Unique peaks over the number of repetitions n: of all classes, and of the expected ones, 1 to n.

    `counterfactual` is 1/n: a model to which a shorter token is one token gives the same count at every factor. A ratio
    is observed over counterfactual.
    """
    peaks = unique_peaks(curves)
    expected = peaks & {str(number) for number in range(1, repetitions + 1)}
    found, known = len(peaks), len(expected)
    values = (1 / repetitions, found / repetitions, known / repetitions, float(found), float(known))
    return dict(zip(FREQUENCIES, values, strict=True))


def proportion_error(curves: Curves, factors: Sequence[float], repetitions: int) -> float:
    """The mean distance, over factors f, of the likeliest digit from n f, n being the number of repetitions.

    A count that is rounded is 1/4 off on average, and one that stays n, as if any token counted as one, n (1 - f).
    """
    counts_F = [int(likeliest(curves, at)) for at in range(len(factors))]
    return float(np.mean([abs(count - repetitions * factor) for count, factor in zip(counts_F, factors, strict=True)]))


def shrunk_labels(other: int, shrunk: int) -> set[str]:
    """First digits of the sums of `other` and each single digit of `shrunk`."""
    return {str(other + int(digit))[0] for digit in str(shrunk)}


def sum_properties(curves: Curves, original: str, shrunk: set[str]) -> dict[str, bool]:
    """P1, P2 and P3 of the sums experiment; `curves` of all first digits, the last factor being 1.

    valid: the unchanged sentence gives the original label. At some factor the shrunk labels together are likelier
    than the original one (P1), and than any other label (P2); and no other label is ever on top (P3). A label that
    is both original and shrunk counts as original.
    """
    shrunk = shrunk - {original}
    values = {name: np.asarray(curve, dtype=np.float64) for name, curve in curves.items()}
    together_F = sum((values[name] for name in shrunk), start=np.zeros_like(values[original]))
    above_original_F = together_F > values[original]
    above_all_F = above_original_F
    for name in values.keys() - shrunk - {original}:
        above_all_F = above_all_F & (together_F > values[name])
    p1, p2 = bool(above_original_F.any()), bool(above_all_F.any())
    return {
        "valid": likeliest(curves) == original,
        "P1": p1,
        "P2": p2,
        "P3": p2 and not unique_peaks(curves) - shrunk - {original},
    }


def published_other_labels(other: int, shrunk: int) -> set[str]:
    """The labels that the published rule takes for others: first digits of `other` + 0 to `other` + 9, without those
    of the right answer and of the shrunk number. Mostly one digit, and often none."""
    digits = {str(other + digit)[0] for digit in range(10)}
    return digits - shrunk_labels(other, shrunk) - {str(other + shrunk)[0]}


def published_sum_properties(curves: Curves, original: str, shrunk: set[str], others: set[str]) -> dict[str, bool]:
    """P1, P2 and P3 by the rule of the published code: no digits count but the right, the shrunk and the `others`.

    valid: the unchanged sentence gives the original label more than the shrunk labels together and than each of the
    others. P3: where the shrunk labels lead the original one, none of the others is above them. A label that is both
    original and shrunk counts as both, so that such a record is never valid.
    """
    values = {name: np.asarray(curve, dtype=np.float64) for name, curve in curves.items()}
    right_F = values[original]
    together_F = sum((values[name] for name in shrunk), start=np.zeros_like(right_F))
    highest_F = np.max([values[name] for name in others], axis=0) if others else np.full_like(right_F, -np.inf)
    above_F = together_F > right_F
    p2 = bool((above_F & (together_F > highest_F)).any())
    return {
        "valid": bool(right_F[-1] > together_F[-1] and right_F[-1] > highest_F[-1]),
        "P1": bool(above_F.any()),
        "P2": p2,
        "P3": p2 and not bool((above_F & (together_F < highest_F)).any()),
    }


def normalised_max_derivative(factors: Sequence[float], curve: Sequence[float]) -> float | None:
    """max |f'| / (max f - min f), by central differences inside; None where f is constant."""
    values_F = np.asarray(curve, dtype=np.float64)
    amplitude = values_F.max() - values_F.min()
    if amplitude == 0:
        return None
    return float(np.abs(np.gradient(values_F, np.asarray(factors, dtype=np.float64))).max() / amplitude)


def outside_ends(curve: Sequence[float]) -> float:
    """The largest distance of a curve to the range between its two ends: m_diff.

    The paper prints |f + max| for values above the range, which is more than the value itself; it means the distance
    |f - max|.
    """
    values_F = np.asarray(curve, dtype=np.float64)
    low, high = min(values_F[0], values_F[-1]), max(values_F[0], values_F[-1])
    return float(np.maximum(low - values_F, values_F - high).clip(min=0).max())
