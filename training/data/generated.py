"""Tasks whose texts are generated, each with an answer to predict, and their sequences by number."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..recipe import FactsData, GeneratedData, PasskeyData, RecallData, Source
from .background import sentences_of
from .documents import good_documents, read_documents
from .examples import Example, Examples, GeneratedTask
from .facts import FactsTask
from .passkey import PasskeyTask
from .recall import RecallTask


class GeneratedExamples(Examples):
    """Generated texts by number: a number's text depends on nothing but the seed and the total length."""

    def __init__(self, task: GeneratedTask, data: GeneratedData, seed: int):
        self.task, self.data, self.seed = task, data, seed

    def fingerprint(self) -> str:
        return self.task.fingerprint()

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
