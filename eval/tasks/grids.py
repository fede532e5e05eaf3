"""Evaluations on a grid of rows by lengths: right answers to batches of prompts, counted and drawn as a heat map."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..charts import finish, heat_map, side_by_side
from ..models import EvaluatedModel, rows_per_batch
from ..overview import Figure, lengths_of
from ..results import groups_of, picture, remove_picture, set_log_scale
from ..results_store import Key, Record
from ..runner import Results
from ..statistics import wilson
from ..tables import key_by, select
from .evaluation import Evaluation, dtype_of, figure_of, shown_name, state_unit
from .window_model import WindowModel, with_window

LINE_STYLES = ("-", "--", "-.")  # in turn, so overlapping lines remain visible
PROMPT_TOKENS = 2**25  # in all prompts of a batch, as integers in memory


class Batch(NamedTuple):
    """A batch of prompts of one cell of a model's grid. Prompts depend only on the seed, the length and the row."""

    model: EvaluatedModel
    length: int  # tokens, answer included
    row_number: int
    row: Any
    first: int  # number of the first prompt in its cell
    size: int


class Grid(Evaluation[Batch]):
    """Evaluates on a grid. A record counts the `correct` ones of `total` answers; `state_bytes` is for one prompt.

    `row` names the grid's rows, and the options hold their values under its plural. `options` also has `lengths`,
    `num_prompts`, `cell_tokens` and `longest_trained`.
    """

    unit = "batch"
    row: ClassVar[str]
    row_title: ClassVar[str]

    def __init__(self, options: Any, models: Sequence[EvaluatedModel]):
        super().__init__(options, with_window(models, options.window, options.device_map))
        given = options.longest_trained
        self.longest_trained = {model.name: given or trained_length(model.source) for model in self.models}

    @staticmethod
    @abstractmethod
    def label(row: Any) -> str:
        """Returns the name of a row in a picture."""

    def settings(self) -> dict[str, Any]:
        # Measurements that are older than these options have no such fields.
        newer = ("cell_tokens", None), ("window", None)
        return {name: value for name, value in super().settings().items() if (name, value) not in newer}

    def items(self) -> list[Batch]:
        options = self.options
        return [
            Batch(model, length, number, row, first, min(size, num_prompts - first))
            for model in self.models
            for length in options.lengths
            for size, num_prompts in [(prompts_per_batch(model, length), self._num_prompts(length))]
            for number, row in enumerate(getattr(options, f"{self.row}s"))
            for first in range(0, num_prompts, size)
        ]

    def _num_prompts(self, length: int) -> int:
        """Returns the number of prompts of a cell."""
        most, allowed = self.options.num_prompts, self.options.cell_tokens
        return most if allowed is None else min(most, max(1, allowed // length))

    def _of_cell(self, record: Record) -> dict[str, Any]:
        """Returns further fields of a cell, from any of its records."""
        return {}

    def num_tokens(self, item: Batch) -> int:
        return min(item.length, item.model.window) if isinstance(item.model, WindowModel) else item.length

    def key(self, item: Batch) -> Key:
        return {**self._cell(item), "first_prompt": item.first}

    def _cell(self, item: Batch) -> dict[str, Any]:
        return {"model": item.model.name, "length": item.length, self.row: item.row}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """Returns `cells`, each with its `accuracy` and the bounds `low` and `high` (Wilson, 95 %)."""
        return {
            "lengths": sorted(self.options.lengths),
            "longest_trained": self.longest_trained,
            "cells": count_cells(measured, lambda item, record: self._cell(item) | self._of_cell(record)),
        }

    @classmethod
    def variant(cls, results: Results) -> str:
        """Returns what is asked in another way than by default, for a row of its own in the overview."""
        return ""

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        """Returns the figures over all cells."""
        measure = f"{cls.kind}{cls.variant(results)}, {lengths_of(results['lengths'])} [% correct]"
        by_model = groups_of(results["cells"], "model")
        return [figure_of(name, measure, pool(cells), results) for (name,), cells in by_model.items()]

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return results["cells"]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws a heat map per model; for several lengths also all rows together and the state, in PATH-length."""
        by_length = path.with_name(f"{path.name}-length")
        remove_picture(by_length)
        if len(results["lengths"]) > 1:
            with picture(by_length, columns=2, figsize=(10, 3.6)) as (accuracy, state):
                cls._lines(accuracy, state, results)
        cls._heat_maps(results, path)

    @classmethod
    def _heat_maps(cls, results: Results, path: Path, title: str | None = None) -> None:
        """Draws one per model, of accuracies or, under a `title`, of other shares."""
        models, lengths, rows = results["models"], results["lengths"], results[f"{cls.row}s"]
        label = max(len(cls.label(row)) for row in rows)
        size = max(3.2, 0.9 + 0.08 * label + 0.62 * len(lengths)), max(2.6, 1.7 + 0.42 * len(rows))
        with side_by_side(path, len(models), *size) as panels:
            if title:
                panels[0].figure.suptitle(title, fontsize=10)
            for axes, model in zip(panels, models, strict=True):
                cls._heat_map(axes, model["name"], results, "%" if title else "% correct")

    @classmethod
    def _lines(cls, accuracy: Any, state: Any, results: Results) -> None:
        """Draws by length the accuracy with its 95 % interval, and the state at the end of a text."""
        lengths = results["lengths"]
        dtypes = {model["name"]: dtype_of(model["name"], results) for model in results["models"]}
        for number, name in enumerate(dtypes):
            by_length = [select(results["cells"], model=name, length=length) for length in lengths]
            shares = [pool(of_length) for of_length in by_length]
            mean, low, high = ([100 * share[field] for share in shares] for field in ("accuracy", "low", "high"))
            names_dtype = len(set(dtypes.values())) > 1 and dtypes[name] != "-"
            label = shown_name(name, results) + (f", {dtypes[name]}" if names_dtype else "")
            style = LINE_STYLES[number % len(LINE_STYLES)]
            look = {"color": f"C{number}", "marker": "o", "markersize": 3, "label": label, "linestyle": style}
            accuracy.plot(lengths, mean, **look)
            accuracy.fill_between(lengths, low, high, color=look["color"], alpha=0.15, linewidth=0)
            state.plot(lengths, [max(cell["state_bytes"] for cell in row) / 1024 for row in by_length], **look)
            if trained := results["longest_trained"][name]:
                label += ": longest text in training"
                accuracy.axvline(trained, color=look["color"], linewidth=1, linestyle=":", label=label)
        held = [cell["state_bytes"] for cell in results["cells"]]
        if max(held) > 10 * min(held) > 0:
            set_log_scale(state, "y")
        else:
            state.set_ylim(bottom=0)
        accuracy.set_ylim(0, 102)
        shown = f"% correct, all {cls.row}s together", f"state of a text [{state_unit(results, *dtypes)}]"
        for panel, y in zip((accuracy, state), shown, strict=True):
            set_log_scale(panel, "x")
            panel.set_xlim(accuracy.get_xlim())
            finish(panel, x="tokens", y=y)
        accuracy.figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)

    @classmethod
    def _heat_map(cls, axes: Any, name: str, results: Results, unit: str) -> None:
        lengths, trained = results["lengths"], results["longest_trained"][name]
        rows, columns = {row: cls.label(row) for row in results[f"{cls.row}s"]}, {n: f"{n:,}" for n in lengths}
        heat_map(axes, key_by(select(results["cells"], model=name), cls.row, "length"), rows, columns, unit)
        axes.set(xlabel="tokens", ylabel=cls.row_title)
        axes.set_title(shown_name(name, results), fontsize=10)
        if trained and trained < lengths[-1]:
            num_trained = sum(length <= trained for length in lengths)
            border = num_trained - 0.5
            above = {"xy": (border, 1), "xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            axes.annotate("never trained", xytext=(3, 4), fontsize=8, ha="left", **above)
            if num_trained:
                axes.axvline(border, color="black", linewidth=2)
                axes.annotate("trained", xytext=(-3, 4), fontsize=8, ha="right", **above)
            axes.set_title(axes.get_title(), fontsize=10, pad=18)


def prompts_per_batch(model: EvaluatedModel, num_tokens: int) -> int:
    """Returns the number of prompts of this length to hold in memory at a time."""
    return min(rows_per_batch(model, num_tokens), max(1, PROMPT_TOKENS // num_tokens))


def pool(records: Sequence[Record]) -> dict[str, Any]:
    """Adds up the answers of several records or cells: `correct`, `total`, `accuracy`, and its bounds."""
    correct, total = (sum(record[field] for record in records) for field in ("correct", "total"))
    low, high = wilson(correct, total)
    return {"correct": correct, "total": total, "accuracy": correct / total, "low": low, "high": high}


def count_cells(
    measured: Iterable[tuple[Any, Record]], cell_of: Callable[[Any, Record], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns cells from the records of batches; a cell's batches follow each other and count `correct` of `total`.

    A cell has its `accuracy` with the bounds `low` and `high` (Wilson, 95 %) and the `state_bytes` of a prompt. If its
    text is longer than the model has positions, it also has their number.
    """
    cells = []
    for cell, batches in groupby(measured, lambda pair: cell_of(*pair)):
        records = [record for _, record in batches]
        further = {name: records[0][name] for name in ("state_bytes", "positions_exceeded") if name in records[0]}
        cells.append({**cell, **pool(records), **further})
    return cells


def trained_length(source: str) -> int | None:
    """Returns the longest text of the recipe beside the model; None if there is no recipe.

    Raises `ValueError` for a damaged recipe.
    """
    recipe, curriculum = Path(source) / "recipe.json", Path(source) / "curriculum.json"
    found = next((path for path in (curriculum, recipe) if path.is_file()), None)
    if found is None:
        return None
    try:
        fields = json.loads(found.read_text(encoding="utf-8"))
        if found == recipe:
            return max((int(stage["total_length"]) for stage in fields.get("stages") or []), default=None)
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        return int(fields["milestones"][-1][1]) * int(config["segment_length"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{found} is damaged: the longest text in training can't be read ({type(error).__name__}: {error});"
            " copy it again, or delete it and pass --longest-trained."
        ) from error
