"""Figures over many records: selections, means, and a row for all models together."""

from collections.abc import Sequence
from typing import Any

from .engine import Record

# Below one half, something else is likelier than all watched answers together.
LEAST_MASS = 0.5
SET = "set"  # the group of a data set's items, which are counted and not drawn one by one


def in_set(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["group"] == SET]


def valid(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["valid"]]


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None if there are no values."""
    return sum(values) / len(values) if values else None


def ratio(number: int | None, total: int) -> float | None:
    """Returns the share of a number in a total; None if either is missing."""
    return number / total if number is not None and total else None


def mass(records: Sequence[Record]) -> float | None:
    """Returns the mean probability of all watched classes together, over factors and valid records."""
    curves = [list(record["curves"].values()) for record in valid(records)]
    return mean([sum(map(sum, one)) / len(one[0]) for one in curves])


def answers(found: dict[str, Any]) -> bool:
    """Whether a model puts at least `LEAST_MASS` on the watched classes; true for summaries without a mass, which
    earlier versions wrote."""
    known = found.get("mass")
    return known is None or known >= LEAST_MASS


def if_answering(found: dict[str, Any], figures: dict[str, float | None]) -> dict[str, float | None]:
    """Returns the figures by name; each is None if the summary's model does not answer."""
    return figures if answers(found) else dict.fromkeys(figures)


def mass_column(what: str) -> str:
    """Returns the title of the column of masses, with the mass below which figures are left out."""
    return f"mass of {what} (below {LEAST_MASS:.0%}: no figures)"


def with_global(
    models: dict[str, dict[str, Any]], fields: Sequence[str], counts: Sequence[str] = ("records", "valid")
) -> dict[str, dict[str, Any]]:
    """Returns the models with their mass and figures, and for several models a row `Global`.

    A model that does not answer has no figures. `Global` covers all records of the other models: `counts` are summed,
    and figures are weighted by valid records. A figure that a summary lacks, as in earlier versions, is None.
    """
    nothing = dict.fromkeys(fields)
    shown: dict[str, dict[str, Any]] = {
        name: {"mass": None} | (nothing | found if answers(found) else found | nothing)
        for name, found in models.items()
    }
    answering = [found for name, found in shown.items() if answers(models[name])]
    if len(models) < 2:
        return shown
    total: dict[str, Any] = {}
    for name in counts:
        numbers = [found[name] for found in answering]
        total[name] = None if None in numbers else sum(numbers)
    for field in ("mass", *fields):
        known = [found for found in answering if found[field] is not None]
        weight = sum(found["valid"] for found in known)
        total[field] = sum(found[field] * found["valid"] for found in known) / weight if weight else None
    return shown | {"Global": total}


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
