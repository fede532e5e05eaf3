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
    """Generated texts by number; a text depends only on its number, the seed and the total length."""

    def __init__(self, task: GeneratedTask, data: GeneratedData, seed: int):
        self.task, self.data, self.seed = task, data, seed

    def fingerprint(self) -> str:
        return self.task.fingerprint()

    def sequence(self, number: int, total_length: int) -> list[Example]:
        """Returns one document. Raises `ValueError` if its text does not fit into `total_length` tokens."""
        generator = np.random.default_rng([self.seed, total_length, number])
        return [self.task.example(total_length, self.data.shortest, self.data.background, generator)]


def read_sentences(sources: Sequence[Source]) -> Iterator[str]:
    """Yields the sentences of all documents. Raises `ValueError` for a document that can't be read."""
    for document in good_documents(read_documents(sources, with_summaries=False), "refuse"):
        yield from sentences_of(document.text)


def make_generated_task(data: GeneratedData, tokenizer: Any) -> GeneratedTask:
    """Returns the task of a recipe's `data`, whose own keys are the task's options.

    Raises `ValueError` for a tokenizer that does not know its words, and for sources without sentences.
    """
    options = data.model_dump(exclude={*GeneratedData.model_fields, "sources"})
    if isinstance(data, FactsData):
        return FactsTask(tokenizer, sentences=read_sentences(data.sources) if data.sources else None, **options)
    if isinstance(data, RecallData):
        return RecallTask(tokenizer, **options)
    assert isinstance(data, PasskeyData)
    return PasskeyTask(tokenizer, **options)
