"""The interface between a task and training: sequences by number, collated into batches.

A task's sequence number k is the same at any time and on any rank. So the position in the data is a count:
a resumed run, on any number of ranks, continues exactly where the former run stopped.

Axes: B rows, N tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from condense.configuration import IGNORE_INDEX


class Example(NamedTuple):
    """Tokens of one document and, of the same length, the labels: `IGNORE_INDEX` where no loss is taken.

    The first token has no label, since nothing predicts it. `place` is that of the first token among all tokens of the
    prepared documents; None for generated texts.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    place: int | None = None

    @classmethod
    def with_labels_at(cls, places: Any, input_ids: np.ndarray) -> "Example":
        """The tokens with the labels of those at some places."""
        labels = np.full(len(input_ids), IGNORE_INDEX)
        labels[places] = input_ids[places]
        return cls(input_ids, labels)


class Epochs:
    """Maps the number of a sequence in a run to an index: each epoch has every index once, in an order of its own.

    Without a seed, every epoch has the indices in their order.
    """

    def __init__(self, seed: int | None):
        self.seed = seed

    def index(self, number: int, count: int) -> int:
        epoch, index = divmod(number, count)
        return index if self.seed is None else int(_order(self.seed, epoch, count)[index])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


class Examples(Protocol):
    def sequence(self, number: int, total_length: int) -> list[Example]:
        """The `number`-th sequence: one or more documents of together at most `total_length` tokens."""
        ...

    def source(self, number: int, total_length: int) -> int:
        """The number of the source that the `number`-th sequence comes from; of a packed one, that of its first row."""
        return 0

    def fingerprint(self) -> str:
        """A hash that is the same on all ranks, unless they have prepared different documents."""
        ...


class GeneratedTask(Protocol):
    """Makes texts that end with their answer.

    Their labels are those of the answer and, before it, of `background` other tokens of each text. A text is the same
    for the same state of the generator of random numbers. Both methods raise `ValueError` where a text without
    background does not fit, or has fewer than `background` tokens that can be predicted.
    """

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` [B, N] of equally long texts of at most `num_tokens` tokens."""
        ...

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        """One text of at most `total_length` tokens, and of at least `shortest` of them where it can be."""
        ...

    def fingerprint(self) -> str:
        """Identity of the text that the task has read from files; empty if it reads none."""
        return ""


def collate(examples: Sequence[Example], extend_to: int = 0, with_places: bool = False) -> dict[str, torch.Tensor]:
    """`input_ids`, `labels` and, where lengths differ, `attention_mask` [B, N], padded on the right.

    Each document is a row of its own, also those packed into one sequence: rows share no memory. With
    `extend_to`, the longest row is extended to that number of tokens, with tokens that have no labels. `with_places`
    adds `places` [B].
    """
    lengths = [len(example.input_ids) for example in examples]
    longest = max(*lengths, extend_to)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    mask = torch.zeros_like(input_ids)
    for row, example in enumerate(examples):
        assert example.labels[0] == IGNORE_INDEX
        length = len(example.input_ids)
        input_ids[row, :length] = torch.as_tensor(example.input_ids)
        labels[row, :length] = torch.as_tensor(example.labels)
        mask[row, :length] = 1
    mask[lengths.index(max(lengths)), :extend_to] = 1
    batch = {"input_ids": input_ids, "labels": labels}
    if with_places:
        batch["places"] = torch.tensor([example.place for example in examples])
    return batch if bool(mask.all()) else batch | {"attention_mask": mask}
