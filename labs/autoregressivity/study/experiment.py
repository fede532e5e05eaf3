"""The base of all experiments: models of several seeds, stored by the fields of their items and compared in tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from condense.eval.intervals import format_seeds
from condense.eval.options import identify
from condense.eval.results_store import Record
from condense.eval.runner import Results
from condense.eval.study import study
from condense.eval.study.study import Item

from .options import AblationOptions
from .setup import Setup

NOT_IN_ROWS = ("curve", "quality", "accuracies")  # the fields of a record that the CSV leaves out


class Experiment(study.Experiment[Item]):
    """An experiment; `about` explains it in the report."""

    unit = "model"
    about: ClassVar[str]

    def __init__(self, options: AblationOptions, output: Path):
        super().__init__(options, output)
        self.setup = Setup(options, output)

    def settings(self) -> dict[str, Any]:
        self.setup.make()
        return identify(self.options) | self.setup.described_with_judge()

    def described(self, measured: Sequence[tuple[Item, Record]]) -> list[dict[str, Any]]:
        """Returns the records with the fields of their items."""
        return [{**self.key(item), **record} for item, record in measured]

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Item, Record]]) -> Results:
        return settings | {"about": self.about, "seeds": self.options.seeds} | self.summarise(measured)

    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        return {"cells": self.described(measured)}

    def real_text(self) -> dict[str, float]:
        """Measures the held-out text, for comparison with generated texts."""
        return self.setup.quality(self.setup.prompts)

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [{name: value for name, value in cell.items() if name not in NOT_IN_ROWS} for cell in results["cells"]]


def titles(names: Sequence[str]) -> list[str]:
    """Returns the titles of columns from the names of fields."""
    return [name.replace("_", " ") for name in names]


def figures(found: dict[str, float], names: Sequence[str]) -> list[str]:
    """Returns the cells of one text or set of images; a dash if it was not measured."""
    return [f"{found[name]:.3f}" if name in found else "-" for name in names]


def means(qualities: Sequence[dict[str, float]], names: Sequence[str]) -> list[str]:
    """Returns the cells of several seeds: means with intervals."""
    return [format_seeds([quality[name] for quality in qualities], 0 if name == "evaluations" else 3) for name in names]
