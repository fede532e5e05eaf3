"""Figures of many records: selections, means and the row of all models together."""

from collections.abc import Sequence
from typing import Any

from .engine import Record

# Below one half something else is likelier than all watched answers together, so none of them is an answer.
LEAST_MASS = 0.5
SET = "set"  # the group of the items of a data set, which are counted and not drawn one by one


def in_set(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["group"] == SET]


def valid(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["valid"]]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None where there is no value."""
    return sum(values) / len(values) if values else None


def ratio(number: int | None, total: int) -> float | None:
    """The share of a number in a total; None where there is none."""
    return number / total if number is not None and total else None


def mass(records: Sequence[Record]) -> float | None:
    """The mean probability of the watched classes together, over the factors and the valid records."""
    curves = [list(record["curves"].values()) for record in valid(records)]
    return mean([sum(map(sum, one)) / len(one[0]) for one in curves])


def answers(found: dict[str, Any]) -> bool:
    """Whether a model puts at least `LEAST_MASS` on the watched classes. Summaries of earlier versions don't tell."""
    known = found.get("mass")
    return known is None or known >= LEAST_MASS


def if_answering(found: dict[str, Any], figures: dict[str, float | None]) -> dict[str, float | None]:
    """The figures by name; None for each where the model of the summary does not answer."""
    return figures if answers(found) else dict.fromkeys(figures)


def mass_column(what: str) -> str:
    """The title of the column of the mass, which says below which mass figures are left out."""
    return f"mass of {what} (below {LEAST_MASS:.0%}: no figures)"


def with_global(
    models: dict[str, dict[str, Any]], fields: Sequence[str], counts: Sequence[str] = ("records", "valid")
) -> dict[str, dict[str, Any]]:
    """The models with their mass and figures, and, where there are several, `Global`.

    A model that gives no answer has no figures. `Global` is over all records of the others, with `counts` summed, and
    figures weighted by the valid records. A figure that a summary of an earlier version does not have is None.
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
