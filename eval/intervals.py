"""Means over seeds and their t intervals, on a scale that fits the values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple


class Scale(NamedTuple):
    """A scale for means and t intervals of values strictly between two bounds."""

    to: Callable[[float], float]
    back: Callable[[float], float]
    least: float
    most: float


LINEAR = Scale(float, float, -math.inf, math.inf)
LOG = Scale(math.log, math.exp, 0.0, math.inf)  # for ratios and errors: geometric mean, interval above 0
LOGIT = Scale(
    lambda share: math.log(share / (1 - share)), lambda odds: 1 / (1 + math.exp(-odds)), 0.0, 1.0
)  # for shares
FISHER = Scale(math.atanh, math.tanh, -1.0, 1.0)  # for correlations: interval within -1 and 1


def interval(values: Sequence[float], scale: Scale = LINEAR) -> tuple[float, float | None, float | None]:
    """Returns the mean and the low and high end of the 95 % t interval, on a scale.

    The interval is None for a single value. If a value lies at a bound, the scale can't be used: the interval is None
    and the mean arithmetic.
    """
    from scipy.stats import t

    number = len(values)
    if number < 2 or any(value <= scale.least or value >= scale.most for value in values):
        return fmean(values), None, None
    scaled = [scale.to(value) for value in values]
    mean, half = fmean(scaled), float(t.ppf(0.975, number - 1)) * stdev(scaled) / number**0.5
    return scale.back(mean), scale.back(mean - half), scale.back(mean + half)


def format_seeds(
    values: Sequence[float | None], digits: int = 3, scale: Scale = LINEAR, form: str = "f", unit: float = 1
) -> str:
    """Returns the mean over the seeds that have a value, and its interval, as text; a dash if none has. A `unit` of 100
    shows shares in percent. Unlike `written`, it gives a mean even if some run has no value."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return format_interval(interval(known, scale), f",.{digits}{form}", unit)


def format_interval(found: Iterable[float | None], form: str, unit: float = 1) -> str:
    """Formats a mean, and the ends of its interval if it has one."""
    mean, *bounds = (f"{unit * number:{form}}" for number in found if number is not None)
    return f"{mean} [{', '.join(bounds)}]" if bounds else mean


def mean_and_interval(
    values: Sequence[float | None], least: float = -math.inf, most: float = math.inf
) -> dict[str, Any]:
    """Returns `values`, `mean`, and `low` and `high` of the 95 % t interval, clipped to [least, most]. There is no mean
    if a run has no value."""
    known = [value for value in values if value is not None]
    mean, low, high = interval(known) if known and len(known) == len(values) else (None, None, None)
    if low is not None and high is not None:
        low, high = max(low, least), min(high, most)
    return {"values": list(values), "mean": mean, "low": low, "high": high}


def format_mean(found: Mapping[str, Any] | None) -> str:
    """Formats the result of `mean_and_interval`; a dash if no run has a value."""
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
    """Draws the mean curve of several seeds, and its interval at each `x` that has one."""
    found = [interval(values, scale) for values in zip(*curves, strict=True)]
    panel.plot(x, [mean for mean, _, _ in found], **{"label": label, "color": color, "linewidth": 1.2} | style)
    if len(curves) > 1:
        low, high = ([math.nan if values[side] is None else values[side] for values in found] for side in (1, 2))
        panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
