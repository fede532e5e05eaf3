"""Chunks of a shard's records as tokens, each with the positions before and after it.

A chunk depends only on its shard, so the number of processes does not change it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from ..recipe import Source
from .documents import Document, make_document
from .shards import Problem, Record, Shard
from .store import Encode, Tokens, read_part, write_part

Outcome = Tokens | Problem | str  # of a record: the last is the reason why it is dropped


class Chunk(NamedTuple):
    number: int  # in the shard
    before: Any  # positions in the shard, as JSON
    after: Any
    outcomes: list[Outcome]

    def to_bytes(self) -> Any:
        notes = {
            "chunk": [self.number, self.before, self.after],
            "outcomes": [_describe(outcome) for outcome in self.outcomes],
        }
        sink = pa.BufferOutputStream()
        write_part(sink, self.kept, notes)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Chunk":
        part = read_part(pa.py_buffer(data))
        kept, (number, before, after) = map(part.document, range(len(part.ends))), part.notes["chunk"]
        return cls(number, before, after, [_outcome(item, kept) for item in part.notes["outcomes"]])

    @property
    def kept(self) -> list[Tokens]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Tokens)]


class Reading(NamedTuple):
    """A shard to read from chunk number `first` on; this chunk begins at `position`."""

    source: Source
    source_number: int
    shard: Shard
    shard_number: int
    first: int
    position: Any


def read_chunks(
    reading: Reading, with_summaries: bool, encode: Encode, on_read: Callable[[str], object] = lambda where: None
) -> Iterator[Chunk]:
    """The chunks of a shard; `on_read` is called with the place of each one before it is tokenised."""
    number, position = reading.first, reading.position
    for records, after in reading.shard.chunks(position):
        on_read(f"{records[0][0]} to {records[-1][0]}")
        yield Chunk(number, position, after, _encode(records, reading, with_summaries, encode))
        number, position = number + 1, after


def _encode(records: Sequence[Record], reading: Reading, with_summaries: bool, encode: Encode) -> list[Outcome]:
    made = [make_document(record, reading.source, with_summaries) for record in records]
    documents = [document for document in made if isinstance(document, Document)]
    try:
        encoded = iter(encode(documents) if documents else [])
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{_failing(documents, encode)}: {type(error).__name__}: {error}") from error
    outcomes = [next(encoded) if isinstance(item, Document) else item for item in made]
    source = reading.source_number
    return [outcome._replace(source=source) if isinstance(outcome, Tokens) else outcome for outcome in outcomes]


def _failing(documents: Sequence[Document], encode: Encode) -> str:
    """The place of the document that can't be tokenised; the places of all documents if each one can be alone."""
    for document in documents:
        try:
            encode([document])
        except Exception:
            return document.where
    return f"{documents[0].where} to {documents[-1].where}"


def _describe(outcome: Outcome) -> list[str]:
    if isinstance(outcome, Tokens):
        return ["kept", outcome.remark]
    if isinstance(outcome, str):
        return ["dropped", outcome]
    return ["problem", outcome.where, outcome.kind, outcome.detail]


def _outcome(item: list[str], kept: Iterator[Tokens]) -> Outcome:
    kind, *texts = item
    if kind == "kept":
        return next(kept)._replace(remark=texts[0])
    return texts[0] if kind == "dropped" else Problem(*texts)
