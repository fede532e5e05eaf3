"""Prompts, each followed by the tokens to predict: questions with answers, documents with summaries."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from condense.text import first_tokens

from .documents import Document
from .epochs import Epochs
from .examples import IGNORE_INDEX, Example, places_of
from .store import Store, Tokens


def question_encoder(tokenizer, total_length: int):
    """Tokenises unchanged prompts, with their answers and an eos, into at most `total_length` tokens.

    Prompt and answer are one text to the tokenizer, after the first tokens of every text: so a model sees the same
    tokens in training as when it is asked. A token that contains characters of both belongs to the answer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not report where an answer begins: load a fast tokenizer.")
    first = first_tokens(tokenizer)
    last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode_one(prompt: str, ids: list[int], offsets: list[tuple[int, int]]) -> Tokens | str:
        num_given = len(first) + sum(end <= len(prompt) for _, end in offsets)
        ids = [*first, *ids, *([] if ids[-1:] == last else last)]
        if len(ids) > total_length:
            return f"over {total_length} tokens"
        return Tokens(np.array(ids), num_given) if num_given else "no token before the answer"

    def encode(documents: Sequence[Document]) -> list[Tokens | str]:
        texts = [document.text + document.summary for document in documents]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        columns = zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [encode_one(document.text, ids, offsets) for document, ids, offsets in columns]

    return encode


class AnswerExamples:
    """One prompt with its answer per sequence: documents `first` to `last - 1` of a store."""

    def __init__(self, store: Store, first: int, last: int, seed: int | None):
        self.store, self.first, self.last = store, first, last
        self.epochs = Epochs(seed)
        self.places = places_of(store.lengths)
        self.fitting = lru_cache(maxsize=4)(self._fitting)

    def _fitting(self, total_length: int) -> np.ndarray:
        """The numbers of the documents that fit."""
        fitting = np.flatnonzero(self.store.lengths[self.first : self.last] <= total_length)
        if not len(fitting):
            raise ValueError(f"no prompt with its answer fits into total_length={total_length} tokens: allow more.")
        return fitting

    def num_sequences(self, total_length: int) -> int:
        return len(self.fitting(total_length))

    def left_out(self, total_length: int) -> str:
        """Describes the documents that no sequence of this length holds; empty where there are none."""
        documents = self.last - self.first - len(self.fitting(total_length))
        return f"{documents:,} longer documents left out" if documents else ""

    def fingerprint(self) -> str:
        return self.store.fingerprint(self.first, self.last)

    def source(self, number: int, total_length: int) -> int:
        return int(self.store.sources[self._document(number, total_length)])

    def _document(self, number: int, total_length: int) -> int:
        fitting = self.fitting(total_length)
        return self.first + int(fitting[self.epochs.index(number, len(fitting))])

    def sequence(self, number: int, total_length: int) -> list[Example]:
        document = self._document(number, total_length)
        tokens = self.store[document]
        input_ids = tokens.input_ids.astype(np.int64)
        labels = input_ids.copy()
        labels[: tokens.num_given] = IGNORE_INDEX
        return [Example(input_ids, labels, int(self.places[document]))]
