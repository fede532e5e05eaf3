"""Experiments on models that they train, and studies, which train one model by a recipe for each item."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, TypeVar

from condense.training.recipe import Recipe

from ..results_store import Key, Record
from ..runner import Task
from .training import check_one_gpu, read_curve, remove_checkpoints, train_alone

Item = TypeVar("Item", bound=Any)  # a named tuple with a `seed`


class Experiment(Task[Item]):
    """A measurement of models that it trains. A record belongs to one seed, so more seeds can be added later."""

    def __init__(self, options: Any, output: Path):
        self.options, self.output = options, output

    def key(self, item: Item) -> Key:
        return item._asdict()


class Study(Experiment[Item]):
    """Trains a model for each item. A record has `curve`, the losses by validation, and the model's measurements."""

    def __init__(self, options: Any, output: Path):
        check_one_gpu()
        super().__init__(options, output)

    @abstractmethod
    def recipe(self, item: Item) -> Recipe: ...

    @abstractmethod
    def measure_trained(self, item: Item, recipe: Recipe) -> Record:
        """Returns the measurements of the model that a recipe has trained."""

    def measure(self, item: Item) -> Record:
        recipe = self.recipe(item)
        train_alone(recipe)
        record = {"curve": read_curve(recipe.output), **self.measure_trained(item, recipe)}
        remove_checkpoints(recipe.output)  # a run that was stopped before this line can resume
        return record
