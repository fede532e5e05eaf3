"""The common base of all depth experiments, as tasks of the runner."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..options import stored
from ..results_store import Key, Record
from ..runner import Results, Task
from .data import load_corpus
from .models import PAPER, SMALL
from .options import DepthOptions
from .pretraining import Setup

Item = TypeVar("Item", bound=NamedTuple)


class Experiment(Task[Item]):
    """An experiment. `about` explains it in the report; trained models are in the output folder.

    More seeds can be added later: a record belongs to one seed.
    """

    about: ClassVar[str]
    options: DepthOptions

    def __init__(self, options: DepthOptions, output: Path):
        self.options, self.output, self.size = options, output, SMALL if options.small else PAPER

    @classmethod
    def name(cls) -> str:
        return cls.kind.removeprefix("depth_")

    @cached_property
    def setup(self) -> Setup:
        """The size and the texts, loaded on first use."""
        return Setup(self.size, load_corpus(self.options, self.size))

    @property
    def seeds(self) -> range:
        return range(self.options.seeds)

    def settings(self) -> dict[str, Any]:
        return stored(self.options) | {"size": asdict(self.size), "corpus": self.setup.corpus.described}

    def key(self, item: Item) -> Key:
        return item._asdict()

    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        return {"records": [self.key(item) | record for item, record in measured]}

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Item, Record]]) -> Results:
        found = {"about": self.about, "seeds": self.options.seeds}
        return found | super().results(settings, measured)
