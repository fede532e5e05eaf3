"""The micro-batches of a run with stages, by number.

The sequences of each length are numbered from 0; ranks and accumulation only divide them. So a run has the same batches
on any number of ranks.

Under ZeRO-3 every use of a weight gathers it from all ranks, so all ranks must run the same number of segments. If the
texts differ in length, one row of each micro-batch is extended to the full length.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ..recipe import DocumentData, GeneratedData, Recipe, Source, TextData
from .examples import Examples, collate


def evaluated_sources(recipe: Recipe) -> list[str]:
    """Returns the names of the sources with validation losses of their own: none for one source or packed sequences."""
    data = recipe.data
    packs = isinstance(data, TextData) and data.fit == "pack"
    if not isinstance(data, DocumentData) or not recipe.evaluation or packs:
        return []
    sources = recipe.evaluation.sources or data.sources
    return source_names(sources) if len(sources) > 1 else []


def source_names(sources: Sequence[Source]) -> list[str]:
    """Returns short names: a hub data set's, a file's or its folder's. Equal names are numbered from 1."""
    names = [_source_name(source) for source in sources]
    once, unique = {name for name in names if names.count(name) == 1}, list[str]()
    for name in names:
        numbered = (f"{name}_{n}" for n in count(1))
        unique.append(name if name in once else next(other for other in numbered if other not in once.union(unique)))
    return unique


def _source_name(source: Source) -> str:
    if source.hub is not None:
        return source.hub.rpartition("/")[2]
    assert source.files is not None
    parts = (Path(part).stem for part in reversed(Path(source.files).parts))
    return next((part for part in parts if part and not set(part) & set("*?[/")), "files")


def _collate(examples: Examples, numbers: Sequence[int], total_length: int, equal_lengths: bool, **options: bool):
    rows = [row for number in numbers for row in examples.sequence(number, total_length)]
    return collate(rows, extend_to=total_length if equal_lengths else 0, **options)


class StageBatches(Dataset):
    """Item i is the i-th micro-batch over all ranks: whole steps of `accumulation` micro-batches a rank."""

    def __init__(self, recipe: Recipe, examples: Examples, ranks: int, equal_lengths: bool = False):
        self.recipe, self.examples, self.equal_lengths = recipe, examples, equal_lengths
        self.per_step = recipe.accumulation(ranks) * ranks

    def __len__(self) -> int:
        return self.recipe.steps * self.per_step

    def __getitem__(self, index: int) -> dict[str, Any]:
        total_length, before = self._stage_at(index // self.per_step)
        first = (index - before * self.per_step) * self.recipe.micro_batch
        numbers = range(first, first + self.recipe.micro_batch)
        with_places = self.recipe.objective.needs_places
        batch = _collate(self.examples, numbers, total_length, self.equal_lengths, with_places=with_places)
        return batch | {"name": f"sequences {numbers[0]} to {numbers[-1]} of length {total_length}"}

    def _stage_at(self, step: int) -> tuple[int, int]:
        """Returns the length of a step's texts, and how many of the steps before it had texts of another length."""
        assert self.recipe.stages is not None
        stage = self.recipe.stage_at(step)
        total_length = self.recipe.stages[stage].total_length
        earlier = self.recipe.stages[:stage]
        return total_length, sum(other.steps for other in earlier if other.total_length != total_length)


class ValidationBatches(Dataset):
    """The sequences to validate with in micro-batches, all as long as the longest stage: losses of all stages compare.

    A micro-batch has sequences of one source. `source_names` has the names of the sources, for a loss of each; it is
    empty for one source, or if packed sequences mix them. With `equal_lengths`, for ZeRO-3, sequences come one by one,
    because ranks would use the head unequally often in unequal micro-batches. Generated texts come one by one because
    their accuracy needs all logits from the first answer on, and answers in texts of different lengths lie far apart.
    """

    def __init__(self, recipe: Recipe, examples: Examples, equal_lengths: bool = False):
        assert recipe.evaluation is not None and recipe.stages is not None
        self.examples, self.num_sequences = examples, recipe.evaluation.sequences
        self.equal_lengths = equal_lengths
        self.total_length = recipe.longest_text()
        self.source_names = evaluated_sources(recipe)
        rows = 1 if equal_lengths or isinstance(recipe.data, GeneratedData) else recipe.micro_batch
        self.numbers = [  # of the sequences of each micro-batch
            of_source[first : first + rows]
            for of_source in self._by_source()
            for first in range(0, len(of_source), rows)
        ]

    def _by_source(self) -> list[list[int]]:
        every = range(self.num_sequences)
        if not self.source_names:
            return [list(every)]
        sources = [self.examples.source(number, self.total_length) for number in every]
        return [[number for number in every if sources[number] == source] for source in sorted(set(sources))]

    def source(self, index: int) -> int:
        """Returns the number of the source that a micro-batch comes from."""
        return self.examples.source(self.numbers[index][0], self.total_length)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return _collate(self.examples, self.numbers[index], self.total_length, self.equal_lengths)
