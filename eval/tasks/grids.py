"""Right answers on a grid: counted cell by cell, and drawn as a heat map."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ..results_store import Record
from ..statistics import wilson


def count_cells(
    measured: Iterable[tuple[Any, Record]], cell_of: Callable[[Any, Record], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The cells of batches of prompts, those of a cell one after another; a record counts the `correct` of `total`.

    A cell has its `accuracy` with the bounds `low` and `high` (Wilson, 95 %), and the `state_bytes` of a prompt.
    """
    cells = []
    for cell, batches in groupby(measured, lambda pair: cell_of(*pair)):
        records = [record for _, record in batches]
        correct, total = (sum(record[field] for record in records) for field in ("correct", "total"))
        low, high = wilson(correct, total)
        counts = {"correct": correct, "total": total, "accuracy": correct / total, "low": low, "high": high}
        cells.append({**cell, **counts, "state_bytes": records[0]["state_bytes"]})
    return cells


def heat_map(axes: Any, grid: np.ndarray, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Percentages [rows, columns], written into their cells; one that is not a number is left empty."""
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = "black" if 15 < value < 85 else "white"  # the ends of the scale are dark
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.figure.colorbar(image, ax=axes, label="% correct")
