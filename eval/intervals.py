"""Means over seeds and their t intervals, on a scale that fits the values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple


class Scale(NamedTuple):
    """A scale on which means and t intervals are computed, for values between two bounds, themselves left out."""

    to: Callable[[float], float]
    back: Callable[[float], float]
    least: float
    most: float


LINEAR = Scale(float, float, -math.inf, math.inf)
LOG = Scale(math.log, math.exp, 0.0, math.inf)  # of ratios and errors: the geometric mean, and no interval below 0
LOGIT = Scale(
    lambda share: math.log(share / (1 - share)), lambda odds: 1 / (1 + math.exp(-odds)), 0.0, 1.0
)  # of shares
FISHER = Scale(math.atanh, math.tanh, -1.0, 1.0)  # of correlations: no interval beyond 1


def interval(values: Sequence[float], scale: Scale = LINEAR) -> tuple[float, float | None, float | None]:
    """The mean and the 95 % t interval, low and high, on a scale.

    The interval is None for a single value, and where a value lies at a bound of the scale, which then can't be used:
    the mean is then the arithmetic one.
    """
    from scipy.stats import t

    number = len(values)
    if number < 2 or any(value <= scale.least or value >= scale.most for value in values):
        return fmean(values), None, None
    scaled = [scale.to(value) for value in values]
    mean, half = fmean(scaled), float(t.ppf(0.975, number - 1)) * stdev(scaled) / number**0.5
    return scale.back(mean), scale.back(mean - half), scale.back(mean + half)


def shown(
    values: Sequence[float | None], digits: int = 3, scale: Scale = LINEAR, form: str = "f", unit: float = 1
) -> str:
    """The mean over the seeds that have a value, and its interval, as text; a dash where there are no values. A `unit`
    of 100 shows shares in percent. See also `written`, which gives no mean where a run has none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return bracketed(interval(known, scale), f",.{digits}{form}", unit)


def bracketed(found: Iterable[float | None], form: str, unit: float = 1) -> str:
    """A mean, and the ends of its interval if it has one."""
    mean, *bounds = (f"{unit * number:{form}}" for number in found if number is not None)
    return f"{mean} [{', '.join(bounds)}]" if bounds else mean


def mean_and_interval(
    values: Sequence[float | None], least: float = -math.inf, most: float = math.inf
) -> dict[str, Any]:
    """Of several runs: the `values`, their `mean`, and `low` and `high` of the 95 % t interval, which is cut at the
    least and the most that a value can be. Where a run has no value there is no mean."""
    known = [value for value in values if value is not None]
    mean, low, high = interval(known) if known and len(known) == len(values) else (None, None, None)
    if low is not None and high is not None:
        low, high = max(low, least), min(high, most)
    return {"values": list(values), "mean": mean, "low": low, "high": high}


def written(found: Mapping[str, Any] | None) -> str:
    """What `mean_and_interval` returns as text; a dash where no run has a value."""
    if found is None or not any(value is not None for value in found["values"]):
        return "-"
    if found["mean"] is None:
        known = sum(value is not None for value in found["values"])
        return f"- ({known} of {len(found['values'])} runs have one)"
    if found["low"] is None or found["low"] == found["high"]:
        return f"{found['mean']:.4g}"
    return f"{found['mean']:.4g} [{found['low']:.4g}, {found['high']:.4g}]"


def band(
    panel: Any,
    x: Sequence[float],
    curves: Sequence[Sequence[float]],
    label: str,
    color: str,
    scale: Scale = LINEAR,
    **style: Any,
) -> None:
    """Draws the mean of the curves of several seeds, and its interval at each `x` where it has one."""
    found = [interval(values, scale) for values in zip(*curves, strict=True)]
    panel.plot(x, [mean for mean, _, _ in found], **{"label": label, "color": color, "linewidth": 1.2} | style)
    if len(curves) > 1:
        low, high = ([math.nan if values[side] is None else values[side] for values in found] for side in (1, 2))
        panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
