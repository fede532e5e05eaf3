"""What an experiment is: its items, what it makes of their records, and its tables."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..results import Table
from .engine import Reader, Record
from .items import Item

SET = "set"  # the group of the items that a data set gives, which are counted and not drawn one by one


class Options(NamedTuple):
    """`data`: a file instead of the package's own; `limit`: the first so many of its records."""

    data: Path | None = None
    limit: int | None = None
    template: str = "sentence"


class Experiment(NamedTuple):
    """`summary` gives figures of one model's records; `tables` shows those of all models, by name."""

    about: str
    items: Callable[[Options], list[Item]]
    summary: Callable[[Sequence[Record]], dict[str, Any]]
    tables: Callable[[dict[str, dict[str, Any]]], list[Table]]
    varied: str  # what the factor is, as the axis of a plot says it
    record: Callable[[Reader, Item], Record] = Reader.record


def in_set(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["group"] == SET]


def valid(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["valid"]]


def mean(values: Sequence[float]) -> float | None:
    """None of none."""
    return sum(values) / len(values) if values else None


def with_global(models: dict[str, dict[str, Any]], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The models and, of several, a row `Global`: all records together, figures weighted by the valid ones."""
    if len(models) < 2:
        return models
    total: dict[str, Any] = {name: sum(found[name] for found in models.values()) for name in ("records", "valid")}
    for field in fields:
        known = [(found[field], found["valid"]) for found in models.values() if found[field] is not None]
        weight = sum(number for _, number in known)
        total[field] = sum(value * number for value, number in known) / weight if weight else None
    return models | {"Global": total}


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
