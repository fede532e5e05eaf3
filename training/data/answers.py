"""Prompts, and what is to be predicted behind them: questions with answers, documents with summaries."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .documents import Document
from .epochs import Epochs
from .examples import IGNORE_INDEX, Example
from .store import Store, Tokens


def question_encoder(tokenizer, total_length: int):
    """Tokenises prompts as they stand, with their answers, into at most `total_length` tokens."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(documents: Sequence[Document]) -> list[Tokens | str]:
        prompts, answers = (
            tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            for texts in ([document.text for document in documents], [document.summary for document in documents])
        )
        pairs = [([*first, *prompt], [*answer, *last]) for prompt, answer in zip(prompts, answers, strict=True)]
        return [
            Tokens(np.array(prompt + answer), len(prompt))
            if len(prompt) + len(answer) <= total_length
            else f"over {total_length} tokens"
            for prompt, answer in pairs
        ]

    return encode


class AnswerExamples:
    """A prompt with its answer a sequence: documents `first` to `last - 1` of a store."""

    def __init__(self, store: Store, first: int, last: int, seed: int | None):
        self.store, self.first, self.last = store, first, last
        self.epochs = Epochs(seed)
        self.places = lru_cache(maxsize=4)(self._places)

    def _places(self, total_length: int) -> np.ndarray:
        """The documents that fit."""
        places = np.flatnonzero(self.store.lengths[self.first : self.last] <= total_length)
        if not len(places):
            raise ValueError(f"no prompt with its answer fits into total_length={total_length} tokens: allow more.")
        return places

    def num_sequences(self, total_length: int) -> int:
        return len(self.places(total_length))

    def left_out(self, total_length: int) -> str:
        """What no sequence of this length holds, in words; nothing where there is nothing."""
        documents = self.last - self.first - len(self.places(total_length))
        return f"{documents:,} longer documents left out" if documents else ""

    def fingerprint(self) -> str:
        return self.store.fingerprint(self.first, self.last)

    def sequence(self, number: int, total_length: int) -> list[Example]:
        places = self.places(total_length)
        tokens = self.store[self.first + int(places[self.epochs.place(number, len(places))])]
        input_ids = tokens.input_ids.astype(np.int64)
        labels = input_ids.copy()
        labels[: tokens.num_given] = IGNORE_INDEX
        return [Example(input_ids, labels)]
