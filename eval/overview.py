"""The table of models and tasks that a report begins with, from all results in a folder.

A task gives one or a few figures per model (`Task.overview`). Results of lm-evaluation-harness and of custom
evaluations are read here. Results that can't be read, or shown as figures, are listed; others have only a section.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from condense.laboratories import SHOWN_BY
from condense.utils.files import read_text

from .results import Table, some_table


@dataclass(frozen=True)
class Figure:
    """One number of a model. Numbers with the same `measure`, which names its unit, are compared with each other.

    `low` and `high` bound its 95 % interval; `digits` is the number of decimals; `sign` stands before a bound.
    """

    model: str
    measure: str
    value: float
    low: float | None = None
    high: float | None = None
    digits: int = 1
    sign: str = ""
    remark: str = ""

    def check(self) -> None:
        """Raises `ValueError` unless value and bounds are finite numbers."""
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        for number in (self.value, *bounds):
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{self.measure!r} of {self.model!r} has {number!r}, not a finite number")

    def __str__(self) -> str:
        shown = f"{self.sign} {self.value:,.{self.digits}f}".strip()
        if self.low is not None and self.high is not None:
            shown += f" ({self.low:,.{self.digits}f} to {self.high:,.{self.digits}f})"
        return f"{shown}, {self.remark}" if self.remark else shown


def lengths_of(lengths: Sequence[int]) -> str:
    """Formats the lengths of texts that are measured together."""
    return f"{min(lengths):,} to {max(lengths):,} tokens" if len(set(lengths)) > 1 else f"{lengths[0]:,} tokens"


def remark_of(name: str, results: dict[str, Any], chat: str = "in a chat") -> str:
    """Returns the remarks beside a model's figures; `chat` says that it got its prompts in a chat template."""
    found = [chat] if name in results.get("chat", ()) else []
    if (positions := results.get("positions_exceeded", {}).get(name)) is not None:
        found.append(f"past its {positions:,} positions")
    return ", ".join(found)


@dataclass
class Overview:
    """Collects the figures of results, and what of them is left out."""

    figures: list[tuple[Figure, str]] = field(default_factory=list)  # with the result, a path in the folder
    weights: dict[tuple[str, str], str] = field(default_factory=dict)  # by model and result
    names: dict[str, str] = field(default_factory=dict)  # of models, by their folder or hub id
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, result: str, figures: Sequence[Figure], models: Iterable[dict[str, Any]] = ()) -> None:
        """Adds the figures of a result. Its `models` have names, and some the hash of their weights.

        Raises `ValueError` for a figure that can't be shown, and then adds none.
        """
        for figure in figures:
            figure.check()
        for model in models:
            if weights := model.get("weights"):
                self.weights[model["name"], result] = weights
            if source := model.get("source"):
                self.names.setdefault(source, model["name"])
        self.figures += [(figure, result) for figure in figures]

    def rows(self) -> dict[str, dict[str, Figure]]:
        """Returns the figures by model and measure.

        Models with the same name but different weights get a row each, marked with the first result that has them. A
        second figure of a model also gets its own row.
        """
        found, first = dict[str, dict[str, Figure]](), dict[str, dict[str, str]]()
        for (name, result), weights in self.weights.items():
            first.setdefault(name, {}).setdefault(weights, result)
        for figure, result in self.figures:
            name, own = figure.model, self.weights.get((figure.model, result))
            if own is not None and len(first[name]) > 1:
                name = f"{name} ({first[name][own]})"
            number = 1
            while figure.measure in found.get(name, {}):
                name = f"{figure.model} ({result})" if number == 1 else f"{figure.model} ({result}, {number})"
                number += 1
            found.setdefault(name, {})[figure.measure] = figure
        return found

    def tables(self) -> list[Table]:
        rows, measures = self.rows(), list(dict.fromkeys(figure.measure for figure, _ in self.figures))
        shown = [[measure, *(str(found.get(measure, "-")) for found in rows.values())] for measure in measures]
        made = [Table("models and tasks (95 % interval)", ["task", *rows], shown)]
        return made + some_table("not in the overview", ["result", "why"], list(map(list, self.left_out.items())))

    def records(self) -> list[dict[str, Any]]:
        return [
            {"model": name, "measure": measure, **asdict(figure) | {"model": name}}
            for name, found in self.rows().items()
            for measure, figure in found.items()
        ]


def own_results(records: Iterable[Path], known: Iterable[str]) -> list[Path]:
    """Finds results of custom evaluations: each KIND.json beside the KIND.records.jsonl that the runner writes."""
    kinds = {path: path.name.removesuffix(".records.jsonl") for path in records}
    return [
        found
        for path, kind in kinds.items()
        if kind not in set(known) and kind.partition("_")[0] not in SHOWN_BY
        if (found := path.with_name(f"{kind}.json")).is_file()
    ]


def own_tables(path: Path) -> list[Table]:
    """Returns KIND.csv as a table, if the file exists and is not empty."""
    beside = path.with_suffix(".csv")
    if not beside.is_file():
        return []
    lines = list(csv.reader(io.StringIO(read_text(beside), newline="")))
    return [Table(path.stem, lines[0], lines[1:])] if lines else []


@dataclass(frozen=True)
class HarnessRun:
    """A run of lm-evaluation-harness: its tasks with their metrics and standard errors, if any.

    A metric can be infinite or NaN: the table shows it, and the overview leaves it out. `source` is the model's folder
    or hub id.
    """

    source: str
    scores: list[tuple[str, str, float, float | None]]
    grouped: set[str]  # tasks that are part of a group with a score of its own

    def figures(self, model: str) -> list[Figure]:
        """Returns the figures of its groups, and of tasks outside any group."""
        found = []
        for task, metric, value, error in self.scores:
            if task not in self.grouped and math.isfinite(value):
                remark = "" if error is None else f"standard error {error:.3f}"
                found.append(Figure(model, f"{task}, {metric} (lm-eval)", value, digits=3, remark=remark))
        return found

    def not_finite(self) -> list[str]:
        """Returns the metrics that have no figure because they are infinite or NaN."""
        ungrouped = [score for score in self.scores if score[0] not in self.grouped]
        return [f"{task}, {metric}" for task, metric, value, _ in ungrouped if not math.isfinite(value)]

    def table(self, model: str) -> Table:
        rows = [
            [task, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}"]
            for task, metric, value, error in self.scores
        ]
        return Table(f"{model}: scores", ["task", "metric", "value", "standard error"], rows)


def read_harness(path: Path) -> HarnessRun:
    """Raises `ValueError` unless lm-evaluation-harness has written the file."""
    found = json.loads(read_text(path))
    if not isinstance(found, dict) or not {"results", "configs", "config"} <= found.keys():
        raise ValueError("not a result of lm-evaluation-harness")
    given = found["config"].get("model_args") or {}
    if isinstance(given, str):
        given = dict(part.partition("=")[::2] for part in given.split(","))
    source = given.get("pretrained") or found.get("model_name") or found["config"].get("model") or path.parent.name
    scores = []
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            # RULER's groups give -1 for lengths that were not measured.
            if not isinstance(value, int | float) or metric.endswith("_stderr") or (metric.isdigit() and value < 0):
                continue
            if not kind:  # sample_len and other counts
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            shown = metric if kind == "none" else f"{metric} ({kind})"
            scores.append((task, shown, float(value), float(error) if isinstance(error, int | float) else None))
    scored = {task for task, _, value, _ in scores if math.isfinite(value)}
    groups = found.get("group_subtasks") or {}
    grouped = {task for group, tasks in groups.items() if group in scored for task in tasks}
    return HarnessRun(str(source), scores, grouped)
