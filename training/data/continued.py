"""The documents of a run that is given more steps: first the former steps' documents, in their former order.

The order of documents depends on their number, and of a data set of the hub a run has as many as its steps need. So the
sequences of the former steps keep their order, and further ones come from the documents that only the new steps need.
If these are too few, all documents are read again, in another order. If there are none, the epochs go on.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..recipe import Recipe, Stage
from .examples import Example, Examples


class DocumentExamples(Examples, Protocol):
    """The sequences of a store's documents."""

    def tokens_read(self, asked: Mapping[int, int]) -> np.ndarray:
        """Returns how many tokens of each of the store's documents a run reads in its first sequences.

        `asked` has the number of sequences of each length.
        """


def plans(recipe: Recipe, former: Sequence[Sequence[Stage]]) -> list[Recipe]:
    """Returns the recipe with each of the stages that its run had before, oldest first, and with its own."""
    return [recipe.model_copy(update={"stages": stages}) for stages in (*former, recipe.stages)]


def sequences_asked(recipe: Recipe) -> dict[int, int]:
    """Returns the number of sequences of each length that a recipe trains on."""
    assert recipe.stages is not None and recipe.global_batch is not None
    asked = Counter[int]()
    for stage in recipe.stages:
        asked[stage.total_length] += stage.steps * recipe.global_batch
    return asked


class Lot(NamedTuple):
    """The sequences of each length that the steps of a recipe ask for, and the documents that they need."""

    asked: dict[int, int]
    last: int  # the documents before this one
    is_enough: bool = True  # False if the source has no more


def continue_run(of: Callable[[int, int], DocumentExamples], first: int, lots: Sequence[Lot]) -> DocumentExamples:
    """Returns the sequences of a run that has had the steps of each lot, one after another.

    `of(first, last)` makes the examples of the documents `first` to `last` - 1. Raises `ValueError` if the further
    steps ask for a length that none of their documents fits into.
    """
    asked, last, _ = lots[0]
    examples: DocumentExamples = of(first, last)
    for lot in lots[1:]:
        if lot.last > last:
            further = of(last if lot.is_enough else first, lot.last)
            examples, last = Continued(examples, asked, further), lot.last
        for total_length, number in lot.asked.items():  # an error now, and not in the middle of the run
            if number > asked.get(total_length, 0):
                examples.sequence(number - 1, total_length)
        asked = {length: max(asked.get(length, 0), lot.asked.get(length, 0)) for length in asked | lot.asked}
    return examples


class Continued:
    """The first `num_before` sequences of each length come from `before`, all others from `after`."""

    def __init__(self, before: DocumentExamples, num_before: dict[int, int], after: DocumentExamples):
        self.before, self.num_before, self.after = before, num_before, after

    def sequence(self, number: int, total_length: int) -> list[Example]:
        examples, own = self._find(number, total_length)
        return examples.sequence(own, total_length)

    def source(self, number: int, total_length: int) -> int:
        examples, own = self._find(number, total_length)
        return examples.source(own, total_length)

    def tokens_read(self, asked: Mapping[int, int]) -> np.ndarray:
        first = {length: min(number, self.num_before.get(length, 0)) for length, number in asked.items()}
        rest = {length: number - first[length] for length, number in asked.items() if number > first[length]}
        return self.before.tokens_read(first) + self.after.tokens_read(rest)

    def fingerprint(self) -> str:
        return f"{self.before.fingerprint()} {self.after.fingerprint()}"

    def _find(self, number: int, total_length: int) -> tuple[Examples, int]:
        num_before = self.num_before.get(total_length, 0)
        return (self.before, number) if number < num_before else (self.after, number - num_before)
