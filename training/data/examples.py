"""What every task hands to training: sequences by number, and how they become a batch.

A task's sequence number k is the same whenever, and on whichever rank, it is asked for. So the position
in the data is a count: a resumed run, on any number of ranks, goes on exactly where the former one was.

Axes: B rows, N tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

IGNORE_INDEX = -100


class Example(NamedTuple):
    """Tokens of one document and, of the same length, what is asked for: -100 where nothing is.

    Nothing can be asked for at the first token.
    """

    input_ids: np.ndarray
    labels: np.ndarray


class Examples(Protocol):
    def sequence(self, number: int, total_length: int) -> list[Example]:
        """The `number`-th sequence: one or more documents of together at most `total_length` tokens."""
        ...

    def fingerprint(self) -> str:
        """The same on all ranks, unless they have prepared different documents."""
        ...


def collate(examples: Sequence[Example], read_on_to: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids`, `labels` and, where lengths differ, `attention_mask` [B, N], padded on the right.

    Each document is a row of its own, also those packed into one sequence: rows share no memory. With
    `read_on_to`, the longest row reads on to so many tokens, behind its end and without labels.
    """
    lengths = [len(example.input_ids) for example in examples]
    longest = max(*lengths, read_on_to)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    mask = torch.zeros_like(input_ids)
    for row, example in enumerate(examples):
        assert example.labels[0] == IGNORE_INDEX
        length = len(example.input_ids)
        input_ids[row, :length] = torch.as_tensor(example.input_ids)
        labels[row, :length] = torch.as_tensor(example.labels)
        mask[row, :length] = 1
    mask[lengths.index(max(lengths)), :read_on_to] = 1
    batch = {"input_ids": input_ids, "labels": labels}
    return batch if bool(mask.all()) else batch | {"attention_mask": mask}
