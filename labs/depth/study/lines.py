"""Tables and curves of the experiments, from data frames; a line holds figures of one seed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from condense.eval.intervals import LINEAR, Scale, band, format_seeds
from condense.eval.results import Table, set_log_scale

YES = {True: "yes", False: "no", None: "needs 2 seeds"}


def groups(lines: pd.DataFrame, *names: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Yields the lines with equal values in some columns, and these values, in order of first appearance."""
    return iter(lines.groupby(names[0] if len(names) == 1 else list(names), sort=False))


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Makes a table with the columns of the last row; a cell that another row doesn't have is a dash."""
    columns = list(rows[-1])
    assert all(set(row) <= set(columns) for row in rows)
    return Table(title, columns, [[row.get(column, "-") for column in columns] for row in rows])


def scientific(values: Iterable[float], scale: Scale = LINEAR) -> str:
    """Formats the mean and its interval over seeds, for values that may be very small."""
    return format_seeds(list(values), 2, scale, form="e")


def draw_band(
    panel: Any, lines: pd.DataFrame, x: str, y: str, label: str, color: str, scale: Scale = LINEAR, **style: Any
) -> None:
    """Draws a column's mean over seeds, and its interval, against another column."""
    curves = [curve.tolist() for _, curve in lines.groupby("seed")[y]]
    band(panel, lines[x].unique(), curves, label, color, scale, **style)


def finish(panel: Any, x: str, y: str, title: str = "", size: int = 10, log: str = "", **legend: Any) -> None:
    """Names the axes of a panel, makes those in `log` logarithmic, and gives it a title, a grid and a legend."""
    for axis in log:
        set_log_scale(panel, axis)
    panel.set(xlabel=x, ylabel=y)
    panel.set_title(title, fontsize=size)
    panel.grid(alpha=0.3)
    panel.legend(**{"fontsize": 7} | legend)
