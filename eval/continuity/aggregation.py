"""Figures of many records: selections, means and the row of all models together."""

from collections.abc import Sequence
from typing import Any

from .engine import Record

# Below one half something else is likelier than all watched answers together: then the likeliest of them is no answer.
LEAST_MASS = 0.5
SET = "set"  # the group of the items of a data set, which are counted and not drawn one by one


def in_set(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["group"] == SET]


def valid(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["valid"]]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None where there is no value."""
    return sum(values) / len(values) if values else None


def mass(records: Sequence[Record]) -> float | None:
    """The mean probability of the watched classes together, over the factors and the valid records."""
    curves = [list(record["curves"].values()) for record in valid(records)]
    return mean([sum(map(sum, one)) / len(one[0]) for one in curves])


def answers(found: dict[str, Any]) -> bool:
    """Whether a model puts at least `LEAST_MASS` on the watched classes."""
    return found["mass"] is None or found["mass"] >= LEAST_MASS


def answering(models: dict[str, dict[str, Any]], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The summaries, without the figures of models that give no answer; `Global` then leaves these out."""
    nothing = dict.fromkeys(fields)
    return {name: found if answers(found) else found | nothing for name, found in models.items()}


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
