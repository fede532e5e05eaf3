"""Parts of pictures: the end of a panel, heat maps, panels side by side."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .results import picture
from .tables import Cells

PAGE_WIDTH = 11.0  # of a report [inches]

Names = Mapping[Any, str]  # of rows or columns, by their values


def finish(panel: Any, title: str = "", x: str = "", y: str = "", legend: int = 0, **small: Any) -> None:
    """Gives a panel its title, the names of its axes, a grid and, with a font size, a legend of its curves."""
    panel.set_xlabel(x, **small)
    panel.set_ylabel(y, **small)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)
    if legend and panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=legend)


def heat_map(axes: Any, cells: Cells, rows: Names, columns: Names, unit: str = "% correct") -> None:
    """Draws the accuracies of cells as percentages, with their numbers; places without a cell stay empty."""
    shares = {place: 100 * cell["accuracy"] for place, cell in cells.items()}
    grid = np.array([[shares.get((row, column), np.nan) for column in columns] for row in rows])
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = "black" if 15 < value < 85 else "white"  # the ends of the scale are dark
            axes.text(column, row, str(round(value)), ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(columns)), list(columns.values()), rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows.values()), fontsize=8)
    axes.figure.colorbar(image, ax=axes, label=unit)


@contextmanager
def side_by_side(path: Path, number: int, width: float, height: float) -> Iterator[list[Any]]:
    """Yields the axes of a picture of panels of this size [inches], in as few rows as fit on a page."""
    rows = math.ceil(number / min(number, max(1, int(PAGE_WIDTH // width))))
    columns = math.ceil(number / rows)
    size = (width * columns, height * rows)
    with picture(path, rows=rows, columns=columns, figsize=size, squeeze=False) as panels:
        for axes in panels.flat[number:]:
            axes.axis("off")
        yield list(panels.flat[:number])
