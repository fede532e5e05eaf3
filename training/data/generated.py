"""Tasks whose texts are generated, each with an answer to predict: the interface, and their sequences by number.

Axes: B rows, N tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..recipe import FactsData, GeneratedData, PasskeyData, RecallData, Source
from .background import sentences_of
from .documents import good_documents, read_documents
from .examples import Example
from .facts import FactsTask
from .passkey import PasskeyTask
from .recall import RecallTask


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

    def fingerprint(self) -> str:
        """Of the text that the task has read from files, the same for the same text; empty where it reads none."""
        ...

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        """One text of at most `total_length` tokens, and of at least `shortest` of them where it can be."""
        ...


class GeneratedExamples:
    """Generated texts by number: a number's text depends on nothing but the seed and the total length."""

    def __init__(self, task: GeneratedTask, data: GeneratedData, seed: int):
        self.task, self.data, self.seed = task, data, seed

    def fingerprint(self) -> str:
        return self.task.fingerprint()

    def source(self, number: int, total_length: int) -> int:
        return 0

    def sequence(self, number: int, total_length: int) -> list[Example]:
        """One document. Raises `ValueError` where its text does not fit into `total_length` tokens."""
        generator = np.random.default_rng([self.seed, total_length, number])
        return [self.task.example(total_length, self.data.shortest, self.data.background, generator)]


def read_sentences(sources: Sequence[Source]) -> Iterator[str]:
    """The sentences of all documents. Raises `ValueError` for a document that can't be read."""
    for document in good_documents(read_documents(sources, with_summaries=False), "refuse"):
        yield from sentences_of(document.text)


def make_generated_task(data: GeneratedData, tokenizer: Any) -> GeneratedTask:
    """The task of a recipe's `data`.

    Raises `ValueError` for a tokenizer that does not know its words, and for sources without sentences.
    """
    if isinstance(data, FactsData):
        sentences = read_sentences(data.sources) if data.sources else None
        return FactsTask(
            tokenizer,
            data.kinds,
            data.facts,
            sentences,
            data.questions,
            data.brief,
            data.early_questions,
            data.distractors,
        )
    if isinstance(data, RecallData):
        return RecallTask(tokenizer, data.pairs, data.form, data.values, data.overwritten, data.questions, data.brief)
    assert isinstance(data, PasskeyData)
    return PasskeyTask(tokenizer, data.num_keys, data.num_digits)
