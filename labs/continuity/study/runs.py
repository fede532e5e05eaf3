"""Means and intervals over several runs of one model, such as seeds: models named NAME#1, NAME#2 ..."""

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

from condense.eval.intervals import format_mean, mean_and_interval
from condense.eval.results import Table

Figures = Mapping[str, float | None]


def over_runs(figures: Mapping[str, Figures], above_one: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Returns `values`, `mean`, `low` and `high` over a model's runs, by its name without the run, and by figure.

    The mean is None if a run has no value, for instance because it does not answer: the mean of the others would
    flatter. Models with a single run are left out. Figures lie between 0 and 1, except those in `above_one`.
    """
    names: dict[str, list[str]] = {}
    for name in figures:
        model, _, run = name.rpartition("#")
        if model and run.isdecimal():
            names.setdefault(model, []).append(name)
    found = {}
    for model, runs in names.items():
        if len(runs) > 1:
            every = dict.fromkeys(figure for run in runs for figure in figures[run])
            found[model] = {
                figure: mean_and_interval(
                    [figures[run].get(figure) for run in runs], 0, inf if figure in above_one else 1
                )
                for figure in every
            }
    return found


def runs_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns a table with a line for each figure and a column for each model."""
    names = list(dict.fromkeys(figure for figures in found.values() for figure in figures))
    rows = [[name, *(format_mean(figures.get(name)) for figures in found.values())] for name in names]
    numbers = [max(len(one["values"]) for one in figures.values()) for figures in found.values()]
    columns = [f"{model}, {number} runs" for model, number in zip(found, numbers, strict=True)]
    return Table("means over runs and their 95 % intervals", ["figure", *columns], rows)
