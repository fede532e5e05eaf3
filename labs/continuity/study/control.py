"""The control of shuffled labels: a figure is evidence only if it fits a record's own label better than others' labels.

A model that says 1, 2 and 3 whatever it reads has as many peaks as one that counts. So each figure is also taken with
the labels of all other records, which is what shuffling the labels gives on average.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from math import inf
from typing import Any

from condense.eval.intervals import format_interval, mean_and_interval
from condense.eval.results import Table, some_table
from condense.eval.statistics import wilson

from .engine import Record

Scores = Mapping[str, float | None]
Pairs = list[tuple[float, float]]
RIGHT = "right with whole tokens"
LOW_IS_GOOD = ("distance",)  # the beginnings of figures that are errors
NOT_DONE, NO_ANSWER = "does not do the task", "does not answer"


def with_other_labels(
    records: Sequence[Record], label_of: Callable[[Record], Hashable], measure: Callable[[Record, Any], Scores]
) -> dict[str, Pairs]:
    """Returns for each figure its pairs, a pair for each record: with its own label, and the mean over those of all
    other records. A record without one of the two, because `measure` returned None, has no pair."""
    labels = Counter(map(label_of, records))
    pairs: dict[str, Pairs] = {}
    for record in records:
        own, scores = label_of(record), {label: measure(record, label) for label in labels}
        others = labels - Counter([own])
        for name, value in scores[own].items():
            found = pairs.setdefault(name, [])
            known = [(scores[label][name], number) for label, number in others.items()]
            weights = sum(number for score, number in known if score is not None)
            if value is not None and weights:
                mean = sum(score * number for score, number in known if score is not None) / weights
                found.append((value, mean))
    return pairs


def compare(pairs: Mapping[str, Pairs]) -> dict[str, dict[str, Any]]:
    """Returns for each figure the means over records with their own labels (`own`) and with others' (`others`), their
    `difference` and the number of `records`. Intervals are t's, and Wilson's for shares of records."""
    return {
        name: {
            "records": len(found),
            "own": _of_own([own for own, _ in found]),
            "others": _with_interval([others for _, others in found], least=0),
            "difference": _with_interval([own - others for own, others in found]),
        }
        for name, found in pairs.items()
    }


def _with_interval(values: Sequence[float], least: float = -inf) -> dict[str, Any]:
    found = mean_and_interval(values, least)
    return {name: found[name] for name in ("mean", "low", "high")}


def _of_own(values: Sequence[float]) -> dict[str, Any]:
    if values and set(values) <= {0.0, 1.0}:
        low, high = wilson(round(sum(values)), len(values))
        return {"mean": sum(values) / len(values), "low": low, "high": high}
    return _with_interval(values, least=0)


def format_mean(found: Mapping[str, Any]) -> str:
    """Formats a mean with its interval; a dash if there is none."""
    return "-" if found["mean"] is None else format_interval((found["mean"], found["low"], found["high"]), ".3f")


def does_the_task(control: Mapping[str, Any]) -> bool:
    """Whether whole tokens are answered better by their own labels than by other records'."""
    return _above(control[RIGHT]["difference"])


def _above(difference: Mapping[str, Any], sign: int = 1) -> bool:
    bound = difference["low" if sign > 0 else "high"]
    return bound is not None and sign * bound > 0


def verdict(name: str, control: Mapping[str, Any], answering: bool = True) -> str:
    """Returns what a figure says. A model that doesn't do the task with whole tokens says nothing about fractions."""
    if not answering:
        return NO_ANSWER
    if name == RIGHT:
        return "does the task" if does_the_task(control) else NOT_DONE
    if not does_the_task(control):
        return "not evidence"
    sign = -1 if name.startswith(LOW_IS_GOOD) else 1
    return "follows its labels" if _above(control[name]["difference"], sign) else "does not follow its labels"


def control_table(models: Mapping[str, Mapping[str, Any]], silent: Set[str]) -> list[Table]:
    """Returns a line for each model and figure; `silent` are the models that don't answer. No table if no summary has a
    control: earlier versions had none."""
    rows = [
        [name, figure, found["records"], *(format_mean(found[part]) for part in ("own", "others", "difference")),
         verdict(figure, summary["control"], name not in silent)]
        for name, summary in models.items()
        for figure, found in summary.get("control", {}).items()
    ]  # fmt: skip
    columns = ["model", "figure", "records", "own labels", "labels of other records", "difference", "verdict"]
    return some_table("control: figures with the labels of other records, and 95 % intervals", columns, rows)
