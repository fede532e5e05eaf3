"""Several runs of one model, such as seeds: models that are named NAME#1, NAME#2 ..., and means with intervals."""

from collections.abc import Mapping
from typing import Any

from ..intervals import interval
from ..results import Table

Figures = Mapping[str, float | None]


def over_runs(figures: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """Of the figures of each model, by the name without its run, and by figure: `values`, their `mean`, `low`, `high`.

    A value is None for a run that does not answer, and then the mean is None, too: the others' alone would flatter.
    Models without other runs are left out.
    """
    names: dict[str, list[str]] = {}
    for name in figures:
        model, separator, _ = name.rpartition("#")
        if separator and model:
            names.setdefault(model, []).append(name)
    return {
        model: {figure: _mean([figures[run].get(figure) for run in runs]) for figure in figures[runs[0]]}
        for model, runs in names.items()
        if len(runs) > 1
    }


def _mean(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    mean, low, high = interval(known) if len(known) == len(values) else (None, None, None)
    return {"values": values, "mean": mean, "low": low, "high": high}


def runs_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line a figure, a column a model."""
    names = list(dict.fromkeys(figure for figures in found.values() for figure in figures))
    rows = [[name, *(_cell(figures.get(name)) for figures in found.values())] for name in names]
    numbers = [max(len(one["values"]) for one in figures.values()) for figures in found.values()]
    columns = [f"{model}, {number} runs" for model, number in zip(found, numbers, strict=True)]
    return Table("means over runs and their 95 % intervals", ["figure", *columns], rows)


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["mean"] is None:
        answering = sum(value is not None for value in found["values"])
        return f"- ({answering} of {len(found['values'])} answer)"
    if found["low"] is None or found["low"] == found["high"]:
        return f"{found['mean']:.4g}"
    return f"{found['mean']:.4g} [{found['low']:.4g}, {found['high']:.4g}]"
