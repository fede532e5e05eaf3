"""Lays a table out as text: words to the left, numbers to the right, within the width of a terminal if there is one."""

import re
import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

GAP = "  "  # between columns
NARROWEST = 8  # a column of text that has to be wrapped
HEAD_WIDTH = 12  # of a head that is wrapped, if there is room for it
MOST_NAMES = 3  # columns that may name a row: up to the first one of words
WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
EMPTY = ("", "-", "OOM")  # in columns of numbers as in columns of text
NUMBER = re.compile(r"([<>] )?[\[(]?[-+]?\d[\d,.+-]*(e[-+]?\d+)?[%x*]?[,;:\])]?(\s|$)")  # < 4.5, 4.47x, 1,024*, [0.1,

Row = Sequence[str]


def is_text(cells: Row) -> bool:
    """Whether a column holds words: at least half of its cells do not begin with a number."""
    known = [cell for cell in cells if cell.strip() not in EMPTY]
    return bool(known) and 2 * sum(NUMBER.match(cell.strip()) is not None for cell in known) <= len(known)


def terminal_width() -> int | None:
    """Returns the columns of the terminal that standard output is; None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def lines(head: Row, rows: Sequence[Row], width: int | None = None) -> list[str]:
    """Returns the lines of a table.

    In a table wider than `width` the head's cells are wrapped. If that does not help, it becomes several tables, each
    with the columns that name a row, and columns of words are wrapped that are still too wide.
    """
    columns = [[head[number], *(row[number] for row in rows)] for number in range(len(head))]
    texts = [is_text(cells) for _, *cells in columns]
    plain, width = [max(map(len, column)) for column in columns], sys.maxsize if width is None else width
    for widths in (plain, *(_widths(columns, head_width) for head_width in (24, 16, HEAD_WIDTH, 8))):
        if _total(widths) <= width:
            return _write_rows(columns, widths, texts)
    widths, found = _widths(columns, HEAD_WIDTH), list[str]()
    for numbers in _parts(widths, texts.index(True) + 1 if True in texts[:MOST_NAMES] else 1, width):
        part = [widths[number] for number in numbers]
        excess = _total(part) - width
        wide = max(numbers, key=lambda number: texts[number] * widths[number])
        if excess > 0 and texts[wide]:
            part[numbers.index(wide)] = max(NARROWEST, widths[wide] - excess)
        found += [
            "",
            *_write_rows([columns[number] for number in numbers], part, [texts[number] for number in numbers]),
        ]
    return found[1:]


def _widths(columns: Sequence[Row], head_width: int) -> list[int]:
    """Returns the widths of columns whose heads are wrapped."""
    return [max(map(len, [*wrap(column[0], head_width, **WORDS), *column[1:], ""])) for column in columns]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _parts(widths: Sequence[int], num_names: int, width: int) -> list[list[int]]:
    """Divides the numbers of the columns into parts that fit into `width`, each with the first `num_names`."""
    names = list(range(num_names))
    parts = [[*names]]
    for number in range(num_names, len(widths)):
        if len(parts[-1]) > num_names and _total([widths[one] for one in (*parts[-1], number)]) > width:
            parts.append([*names])
        parts[-1].append(number)
    return parts


def _write_rows(columns: Sequence[Row], widths: Sequence[int], texts: Sequence[bool]) -> list[str]:
    """Returns the lines of cells that are wrapped to these widths; those of the head stand at its bottom."""
    found = []
    for number, row in enumerate(zip(*columns, strict=True)):
        cells = [
            wrap(cell, width) or [""] if len(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)
        ]
        blank = [[""] * (max(map(len, cells)) - len(cell)) for cell in cells]
        stacked = [above + cell if number == 0 else cell + above for cell, above in zip(cells, blank, strict=True)]
        for line in zip(*stacked, strict=True):
            parts = zip(line, texts, widths, strict=True)
            shown = (part.ljust(width) if text else part.rjust(width) for part, text, width in parts)
            found.append(GAP.join(shown).rstrip())
    return found
