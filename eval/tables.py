"""Tables of records: chosen and found by the values of their fields, one per row, or in a pivot of rows x columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .results import Table

Record = dict[str, Any]
Cells = Mapping[tuple[Any, ...], Record]  # by the values of row and column
Rows = Mapping[tuple[Any, ...], Sequence[Any]]  # the cells that name a row, by its values


def select(records: Iterable[Record], **fields: Any) -> list[Record]:
    """Returns the records whose fields have these values."""
    return [record for record in records if all(record[name] == value for name, value in fields.items())]


def key_by(records: Iterable[Record], *fields: str) -> dict[tuple[Any, ...], Record]:
    """Returns the records by the values of these fields."""
    return {tuple(record[name] for name in fields): record for record in records}


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with the keys of its rows as columns, in the order in which they appear; gaps stay empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Table(title, columns, [[row.get(name, "") for name in columns] for row in rows])


def pivot(title: str, head: list[str], cells: Cells, rows: Rows, columns: Mapping[Any, str], shown: Callable) -> Table:
    """Returns a table of rows x columns. Keys are values in the records; the rows' own are shown under `head`, and
    places without a cell as `shown(None)`."""
    lines = [[*names, *(shown(cells.get((*row, column))) for column in columns)] for row, names in rows.items()]
    return Table(title, [*head, *columns.values()], lines)
