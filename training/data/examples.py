"""The interface between a task and training: sequences by number, collated into batches.

A task's sequence number k is the same at any time and on any rank. So the position in the data is a count:
a resumed run, on any number of ranks, continues exactly where the former run stopped.

Axes: B rows, N tokens.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from condense.configuration import IGNORE_INDEX


class Example(NamedTuple):
    """Tokens of one document, and labels of the same length: `IGNORE_INDEX` if a token has no loss.

    The first token has no label, since nothing predicts it. `place` is its number among all tokens of the prepared
    documents; None for generated texts.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    place: int | None = None

    @classmethod
    def with_labels_at(cls, places: Any, input_ids: np.ndarray) -> "Example":
        labels = np.full(len(input_ids), IGNORE_INDEX)
        labels[places] = input_ids[places]
        return cls(input_ids, labels)


def random_length(least: int, shortest: float, total_length: int, generator: np.random.Generator) -> int:
    """Returns a number of tokens up to `total_length`: at least `least`, and at least the share `shortest` of it."""
    return int(generator.integers(max(least, math.ceil(shortest * total_length)), total_length + 1))


def index_in_epoch(number: int, count: int, seed: int | None) -> int:
    """Returns the index, from 0 to `count` - 1, of a run's sequence number `number`: each epoch has every index once.

    Each epoch has a random order of its own; without a seed, the indices are in order.
    """
    epoch, index = divmod(number, count)
    return index if seed is None else int(_order(seed, epoch, count)[index])


def times_read(number: int, count: int, seed: int | None) -> np.ndarray:
    """Returns how often each index, from 0 to `count` - 1, is that of one of a run's first `number` sequences."""
    epochs, rest = divmod(number, count)
    times = np.full(count, epochs)
    times[slice(rest) if seed is None else _order(seed, epochs, count)[:rest]] += 1
    return times


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


class Examples(Protocol):
    def sequence(self, number: int, total_length: int) -> list[Example]:
        """Returns a sequence: one or more documents with at most `total_length` tokens in total."""

    def source(self, number: int, total_length: int) -> int:
        """Returns the number of a sequence's source; if it is packed, of its first row's source."""
        return 0

    def fingerprint(self) -> str:
        """Returns a hash that is the same on all ranks, unless they have prepared different documents."""


class GeneratedTask(Protocol):
    """Makes texts that end with their answer.

    Labels are the answer and, before it, `background` other tokens of each text. The state of the random generator
    determines a text. Both methods raise `ValueError` if a text without background does not fit, or if fewer than
    `background` of its tokens can be predicted.
    """

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels` [B, N] of equally long texts of at most `num_tokens` tokens."""

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        """Returns a text of random length: at most `total_length` tokens and, if possible, at least `shortest` of them.

        `shortest` is a share of `total_length`.
        """

    def fingerprint(self) -> str:
        """Returns a hash of the text that the task has read from files; empty if it reads none."""
        return ""


def collate(examples: Sequence[Example], extend_to: int = 0, with_places: bool = False) -> dict[str, torch.Tensor]:
    """Returns `input_ids`, `labels` and, if lengths differ, `attention_mask` [B, N], padded on the right.

    Each document is a row, also the documents of a packed sequence: rows share no memory. With `extend_to`, the longest
    row is extended to that number of tokens, without labels. `with_places` adds `places` [B].
    """
    assert all(example.labels[0] == IGNORE_INDEX for example in examples)
    lengths_B = torch.tensor([len(example.input_ids) for example in examples])
    longest = max(int(lengths_B.max()), extend_to)
    lengths_B[lengths_B.argmax()] = longest

    def pad(rows: list[np.ndarray], value: int) -> torch.Tensor:
        rows_BN = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)
        return torch.nn.functional.pad(rows_BN.long(), (0, longest - rows_BN.shape[1]), value=value)

    batch = {
        "input_ids": pad([example.input_ids for example in examples], 0),
        "labels": pad([example.labels for example in examples], IGNORE_INDEX),
    }
    if with_places:
        batch["places"] = torch.tensor([example.place for example in examples])
    mask_BN = (torch.arange(longest) < lengths_B[:, None]).long()
    return batch if bool(mask_BN.all()) else batch | {"attention_mask": mask_BN}
