"""Summaries to predict behind their documents (appendix D of the paper)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from .documents import Document
from .epochs import Epochs
from .examples import IGNORE_INDEX, Example
from .store import Store, Tokens

BEFORE = "Summarize this text:\n"
BEHIND = "\n----\nSummary:\n"


def _ids(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def prompt_frame(tokenizer) -> tuple[list[int], list[int]]:
    """What stands before and behind a document's tokens; the summary follows."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    before, behind = _ids(tokenizer, [BEFORE, BEHIND])
    return first + before, behind


def prompt_ids(tokenizer, document: str) -> list[int]:
    """What a model goes on from when it is to summarise: the same tokens as in training."""
    before, behind = prompt_frame(tokenizer)
    return [*before, *_ids(tokenizer, [document])[0], *behind]


def summary_encoder(tokenizer, total_length: int, too_long: Literal["drop", "cut"]):
    """Tokenises documents with their summaries into at most `total_length` tokens."""
    if tokenizer.eos_token_id is None:
        raise ValueError("summaries end with the tokenizer's eos token, and this tokenizer has none: set one.")
    before, behind = prompt_frame(tokenizer)

    def encode_one(document_ids: list[int], summary_ids: list[int]) -> Tokens | str:
        answer = [*summary_ids, tokenizer.eos_token_id]
        room = total_length - len(before) - len(behind) - len(answer)
        if room < 1:
            return f"summary too long for {total_length} tokens"
        if len(document_ids) > room and too_long == "drop":
            return f"over {total_length} tokens"
        prompt = [*before, *document_ids[:room], *behind]
        remark = f"cut to {total_length} tokens" if len(document_ids) > room else ""
        return Tokens(np.array(prompt + answer), len(prompt), remark)

    def encode(documents: Sequence[Document]) -> list[Tokens | str]:
        texts = _ids(tokenizer, [document.text for document in documents])
        summaries = _ids(tokenizer, [document.summary for document in documents])
        return [encode_one(*pair) for pair in zip(texts, summaries, strict=True)]

    return encode


class SummarizationExamples:
    """A document with its summary a sequence: documents `first` to `last - 1` of a store."""

    def __init__(self, store: Store, first: int, last: int, seed: int | None):
        self.store, self.first, self.last = store, first, last
        self.epochs = Epochs(seed)
        self.places = lru_cache(maxsize=4)(self._places)

    def _places(self, total_length: int) -> np.ndarray:
        """The documents that fit."""
        places = np.flatnonzero(self.store.lengths[self.first : self.last] <= total_length)
        if not len(places):
            raise ValueError(f"no document with its summary fits into total_length={total_length} tokens: allow more.")
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
