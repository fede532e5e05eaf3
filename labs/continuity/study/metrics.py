"""The papers' measures of curves: probabilities of classes against a factor.

Axes: C classes, F factors.
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np

Curves = Mapping[str, Sequence[float]]


def unique_peaks(curves: Curves) -> set[str]:
    """Returns the classes that are the likeliest at some factor, with ties."""
    values_CF = np.asarray(list(curves.values()), dtype=np.float64)
    tops_C = (values_CF == values_CF.max(axis=0)).any(axis=1)
    return {name for name, top in zip(curves, tops_C, strict=True) if top}


def likeliest(curves: Curves, at: int = -1) -> str:
    """Returns the likeliest class at one factor, by default the last."""
    return max(curves, key=lambda name: curves[name][at])


FREQUENCIES = ("counterfactual", "observed", "observed_expected", "ratio", "ratio_expected")


def peak_frequencies(curves: Curves, repetitions: int) -> dict[str, float]:
    """Returns the number of unique peaks over the number of repetitions n, of all classes and of the expected ones, 1
    to n.

    `counterfactual` is 1/n: a model that takes a shorter token as one token gives the same count at every factor. A
    ratio is observed over counterfactual.
    """
    peaks = unique_peaks(curves)
    expected = peaks & {str(number) for number in range(1, repetitions + 1)}
    found, known = len(peaks), len(expected)
    values = (1 / repetitions, found / repetitions, known / repetitions, float(found), float(known))
    return dict(zip(FREQUENCIES, values, strict=True))


def proportion_error(curves: Curves, factors: Sequence[float], repetitions: int) -> float:
    """Returns the mean distance of the likeliest digit from n f over factors f, for n repetitions.

    A rounded count is 1/4 off on average. A count that stays n, as if every token counted as one, is n (1 - f) off.
    """
    counts_F = [int(likeliest(curves, at)) for at in range(len(factors))]
    return float(np.mean([abs(count - repetitions * factor) for count, factor in zip(counts_F, factors, strict=True)]))


def shrunk_labels(other: int, shrunk: int) -> set[str]:
    """Returns the first digits of the sums of `other` and each single digit of `shrunk`."""
    return {str(other + int(digit))[0] for digit in str(shrunk)}


def sum_properties(curves: Curves, original: str, shrunk: set[str]) -> dict[str, bool]:
    """Returns P1, P2 and P3 of the sums experiment, from `curves` of all first digits, whose last factor is 1.

    - valid: the unchanged sentence gives the original label.
    - P1: at some factor the shrunk labels together are likelier than the original one.
    - P2: at some such factor they are also likelier than every other label.
    - P3: P2 holds, and no other label is ever on top.

    A label that is both original and shrunk counts as original.
    """
    shrunk = shrunk - {original}
    others = curves.keys() - shrunk - {original}
    right_F, together_F, highest_F = _compare(curves, original, shrunk, others)
    above_F = together_F > right_F
    p2 = bool((above_F & (together_F > highest_F)).any())
    return {
        "valid": likeliest(curves) == original,
        "P1": bool(above_F.any()),
        "P2": p2,
        "P3": p2 and not unique_peaks(curves) & others,
    }


def _compare(curves: Curves, original: str, shrunk: Set[str], others: Set[str]) -> tuple[np.ndarray, ...]:
    """Returns the curves [F] of the original label, of the shrunk labels together, and of the highest other label."""
    values = {name: np.asarray(curve, dtype=np.float64) for name, curve in curves.items()}
    right_F = values[original]
    together_F = sum((values[name] for name in shrunk), start=np.zeros_like(right_F))
    highest_F = np.max([values[name] for name in others], axis=0) if others else np.full_like(right_F, -np.inf)
    return right_F, together_F, highest_F


def published_other_labels(other: int, shrunk: int) -> set[str]:
    """Returns the labels that the published rule counts as other ones: mostly one digit, and often none.

    They are the first digits of `other` + 0 to `other` + 9, without the right answer's and the shrunk labels.
    """
    digits = {str(other + digit)[0] for digit in range(10)}
    return digits - shrunk_labels(other, shrunk) - {str(other + shrunk)[0]}


def published_sum_properties(curves: Curves, original: str, shrunk: set[str], others: set[str]) -> dict[str, bool]:
    """Returns P1, P2 and P3 by the rule of the published code: only the right, the shrunk and the `others` count.

    - valid: in the unchanged sentence the original label is likelier than the shrunk labels together and than each
      of the others.
    - P1, P2: as in `sum_properties`, for these labels.
    - P3: P2 holds, and wherever the shrunk labels together are above the original one, no other label is above them.

    A label that is both original and shrunk counts as both, so such a record is never valid.
    """
    right_F, together_F, highest_F = _compare(curves, original, shrunk, others)
    above_F = together_F > right_F
    p2 = bool((above_F & (together_F > highest_F)).any())
    return {
        "valid": bool(right_F[-1] > together_F[-1] and right_F[-1] > highest_F[-1]),
        "P1": bool(above_F.any()),
        "P2": p2,
        "P3": p2 and not bool((above_F & (together_F < highest_F)).any()),
    }


def normalised_max_derivative(factors: Sequence[float], curve: Sequence[float]) -> float | None:
    """Returns max |f'| / (max f - min f), by central differences inside; None if f is constant."""
    values_F = np.asarray(curve, dtype=np.float64)
    amplitude = values_F.max() - values_F.min()
    if amplitude == 0:
        return None
    return float(np.abs(np.gradient(values_F, np.asarray(factors, dtype=np.float64))).max() / amplitude)


def outside_ends(curve: Sequence[float]) -> float:
    """Returns the largest distance of a curve to the range between its two ends: m_diff.

    For values above the range the paper prints |f + max|, which exceeds the value itself; it means |f - max|.
    """
    values_F = np.asarray(curve, dtype=np.float64)
    low, high = min(values_F[0], values_F[-1]), max(values_F[0], values_F[-1])
    return float(np.maximum(low - values_F, values_F - high).clip(min=0).max())
