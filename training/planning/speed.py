"""The hours of a run: from a measured rate in tokens, or from an assumed one in operations."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..recipe import Recipe

FLOPS_PER_SECOND = 4e14  # of a rank: about 40 % of an H100's bfloat16 peak, an assumption


class Rate(NamedTuple):
    """Tokens a second of a whole run, and where the figure comes from."""

    tokens_per_second: float
    source: str


def parse_rate(given: str, ranks: int) -> Rate:
    """Returns the rate of a run on `ranks` ranks, from a number or from a former run's `log.jsonl`, scaled to them.

    Raises `ValueError` for a number that is not a rate, and for a log without one.
    """
    try:
        number = float(given)
    except ValueError:
        return _rate_of_log(Path(given), ranks)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"--tokens-per-second {given}: a rate is a finite number above 0.")
    return Rate(number, "as given")


def _rate_of_log(path: Path, ranks: int) -> Rate:
    """Returns the median of the logged lines after the first, which includes the start of the run."""
    remedy = "give the rate as a number, of the whole run"
    if not path.is_file():
        raise ValueError(f"--tokens-per-second {path} is neither a number nor the log.jsonl of a run: {remedy}.")
    rates = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--tokens-per-second {path} can't be read: {error}; {remedy}.") from error
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if "tokens_per_second" in line:
                rates.append(_per_rank(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"--tokens-per-second {path}, line {number} is not a logged line with a rate and its ranks "
                f"({type(error).__name__}: {error}): {remedy}."
            ) from error
    if len(rates) < 2:
        raise ValueError(
            f"--tokens-per-second {path} has {len(rates)} training lines, and the first of a run is not counted: "
            f"{remedy}, or let the run log a second line."
        )
    return Rate(median(rates[1:]) * ranks, f"the median of {path}, scaled to {ranks} ranks")


def _per_rank(line: dict[str, Any]) -> float:
    rate, ranks = float(line["tokens_per_second"]), int(line["ranks"])
    if not (math.isfinite(rate) and rate > 0 and ranks > 0):
        raise ValueError(f"{rate} tokens a second on {ranks} ranks")
    return rate / ranks


def _in_words(hours: float) -> str:
    if hours < 1 / 60:
        return "less than a minute"
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"


def hours(
    recipe: Recipe, operations: dict[str, Any], ranks: int, rate: Rate | None, device: str = "cuda"
) -> tuple[dict[str, Any], str]:
    """Returns figures of the run's duration, and the same in words; `operations` come from `count_operations`."""
    if rate is not None:
        duration = operations["tokens"] / rate.tokens_per_second / 3600
        figures = {"hours": duration, **rate._asdict()}
        return figures, f"{_in_words(duration)} at {rate.tokens_per_second:,.0f} tokens a second ({rate.source})"
    if device == "cpu":
        return {}, "hours on a CPU are not estimated: --tokens-per-second takes a measured rate, or a run's log.jsonl"
    flops = operations["flops"] * (4 / 3 if recipe.gradient_checkpointing else 1)  # a second forward pass
    duration = flops / FLOPS_PER_SECOND / ranks / 3600
    figures = {"assumed_flops_per_second": FLOPS_PER_SECOND, "assumed_hours": duration}
    return figures, (
        f"{_in_words(duration)} if each rank does {FLOPS_PER_SECOND:.0e} operations a second, an assumption: "
        "--tokens-per-second takes a measured rate"
    )
