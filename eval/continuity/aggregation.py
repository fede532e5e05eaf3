"""Figures of many records: selections, means and the row of all models together."""

from collections.abc import Sequence
from typing import Any

from .engine import Record

SET = "set"  # the group of the items of a data set, which are counted and not drawn one by one


def in_set(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["group"] == SET]


def valid(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["valid"]]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None where there is no value."""
    return sum(values) / len(values) if values else None


def with_global(models: dict[str, dict[str, Any]], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The models and, where there are several, `Global`: all records, figures weighted by the valid ones."""
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
