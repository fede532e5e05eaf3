"""The common base of all depth experiments."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from condense.eval.options import identify
from condense.eval.results_store import Record
from condense.eval.runner import Results
from condense.eval.study import study

from .data import load_corpus
from .models import PAPER, SMALL
from .options import DepthOptions
from .pretraining import Setup

Item = TypeVar("Item", bound=NamedTuple)


class Experiment(study.Experiment[Item]):
    """An experiment that `about` explains in the report. Its trained models are in the output folder."""

    about: ClassVar[str]

    def __init__(self, options: DepthOptions, output: Path):
        super().__init__(options, output)
        self.size = SMALL if options.small else PAPER

    @cached_property
    def setup(self) -> Setup:
        """The size and the texts, loaded on first use."""
        return Setup(self.size, load_corpus(self.options, self.size))

    @property
    def seeds(self) -> range:
        return range(self.options.seeds)

    def settings(self) -> dict[str, Any]:
        return identify(self.options) | {"size": asdict(self.size), "corpus": self.setup.corpus.described}

    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        return {"records": [self.key(item) | record for item, record in measured]}

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Item, Record]]) -> Results:
        return {"about": self.about, "seeds": self.options.seeds} | super().results(settings, measured)
