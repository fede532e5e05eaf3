"""Text to predict: documents cut into pieces of the total length, or packed into sequences of it.

A document longer than the total length is cut into whole pieces. Its remainder, and shorter documents, are left out
(`cut`) or packed together (`pack`). Each is a row of its own, so no memory passes from one document to the next. Rows
of similar length are packed together, at most as many as fit into the total length if all were as long as the longest:
a packed sequence never needs more memory than a whole piece.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from condense.utils.text import first_tokens, pieces_of

from .documents import Document
from .examples import IGNORE_INDEX, Example, index_in_epoch, times_read
from .grouping import groups
from .store import Store, Tokens

CHARACTERS_AT_ONCE, PIECES_AT_ONCE = 2**21, 2**10  # of a call of the tokenizer: approximately, and at most


def text_encoder(tokenizer, min_tokens: int):
    """Returns an encoder that drops documents of fewer than `min_tokens` tokens."""
    eos, dropped = tokenizer.eos_token_id, f"under {min_tokens} tokens"
    first, last = (np.array(ids, np.int32) for ids in (first_tokens(tokenizer), [] if eos is None else [eos]))

    def encode(documents: Sequence[Document]) -> list[Tokens | str]:
        encoded = _plain_ids(tokenizer, [document.text for document in documents])
        return [
            Tokens(np.concatenate([first, *ids, last]), 1) if sum(map(len, ids)) >= min_tokens else dropped
            for ids in encoded
        ]

    return encode


def _plain_ids(tokenizer, texts: Sequence[str]) -> list[list[np.ndarray]]:
    """Returns the tokens of the pieces of each text; a tokenizer holds hundreds of bytes for every token of a call."""
    found = [list[np.ndarray]() for _ in texts]
    pieces = ((number, piece) for number, text in enumerate(texts) for piece in pieces_of(tokenizer, text))
    for group in groups(pieces, lambda piece: len(piece[1]), CHARACTERS_AT_ONCE, PIECES_AT_ONCE):
        encoded = tokenizer([piece for _, piece in group], add_special_tokens=False, verbose=False)["input_ids"]
        for (number, _), ids in zip(group, encoded, strict=True):
            found[number].append(np.array(ids, np.int32))
    return found


class Plan(NamedTuple):
    """Pieces of documents; sequence k has the pieces `firsts[k]` to `firsts[k + 1]` - 1."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    firsts: np.ndarray


class StoredExamples:
    """Sequences of the documents `first` to `last` - 1 of a store; with a seed, each epoch has its own order."""

    def __init__(self, store: Store, first: int, last: int, seed: int | None):
        self.store, self.first, self.last, self.seed = store, first, last, seed
        self.lengths = store.lengths[first:last]
        self.places = np.cumsum(store.lengths) - store.lengths  # of each document's first token
        self.plan = lru_cache(maxsize=4)(self._plan)

    @abstractmethod
    def _plan(self, total_length: int) -> Plan:
        """Raises `ValueError` if no document makes a sequence of this length."""

    @abstractmethod
    def left_out(self, total_length: int) -> str:
        """Describes the text that no sequence of this length holds; empty if there is none."""

    def num_sequences(self, total_length: int) -> int:
        return len(self.plan(total_length).firsts) - 1

    def tokens_read(self, asked: Mapping[int, int]) -> np.ndarray:
        tokens = np.zeros(len(self.store.lengths), int)
        for total_length, number in asked.items():
            plan = self.plan(total_length)
            times = times_read(number, self.num_sequences(total_length), self.seed)
            np.add.at(tokens, self.first + plan.document, np.repeat(times, np.diff(plan.firsts)) * plan.length)
        return tokens

    def fingerprint(self) -> str:
        return self.store.fingerprint(self.first, self.last)

    def _pieces(self, number: int, total_length: int) -> range:
        firsts = self.plan(total_length).firsts
        index = index_in_epoch(number, len(firsts) - 1, self.seed)
        return range(firsts[index], firsts[index + 1])

    def source(self, number: int, total_length: int) -> int:
        document = self.plan(total_length).document[self._pieces(number, total_length)[0]]
        return int(self.store.sources[self.first + document])

    def sequence(self, number: int, total_length: int) -> list[Example]:
        return [self._example(self.plan(total_length), n) for n in self._pieces(number, total_length)]

    def _example(self, plan: Plan, n: int) -> Example:
        document, start = self.first + int(plan.document[n]), int(plan.start[n])
        tokens = self.store[document]
        input_ids = tokens.input_ids[start : start + plan.length[n]].astype(np.int64)
        labels = input_ids.copy()
        labels[: max(1, tokens.num_given - start)] = IGNORE_INDEX
        return Example(input_ids, labels, int(self.places[document]) + start)


class TextExamples(StoredExamples):
    """Documents cut into pieces, or packed."""

    def __init__(self, store: Store, first: int, last: int, fit: Literal["cut", "pack"], seed: int | None):
        super().__init__(store, first, last, seed)
        self.fit = fit

    def left_out(self, total_length: int) -> str:
        tokens = self.lengths.sum() - self.plan(total_length).length.sum()
        return f"remainders of {tokens:,} tokens left out" if tokens else ""

    def _plan(self, total_length: int) -> Plan:
        lengths = self.lengths
        num_whole = lengths // total_length
        document = np.repeat(np.arange(len(lengths)), num_whole)
        start = (np.arange(len(document)) - np.repeat(np.cumsum(num_whole) - num_whole, num_whole)) * total_length
        length = np.full(len(document), total_length)
        firsts = list(range(len(document)))
        if self.fit == "pack":
            rest = lengths % total_length
            rested = np.flatnonzero(rest >= 2)  # a single token predicts nothing
            rested = rested[np.argsort(-rest[rested], kind="stable")]  # the first row of a sequence is its longest
            first, last = len(document), len(document) + len(rested)
            while first < last:
                firsts.append(first)
                first += total_length // int(rest[rested[first - len(document)]])
            document = np.concatenate([document, rested])
            start = np.concatenate([start, num_whole[rested] * total_length])
            length = np.concatenate([length, rest[rested]])
        if not firsts:
            raise ValueError(
                f"no document has total_length={total_length} tokens; the longest has {lengths.max(initial=0)}: choose "
                "a shorter one, or data.fit=pack."
            )
        return Plan(document, start, length, np.array([*firsts, len(document)]))
