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

Outcome = Tokens | Problem | str  # of a record: its tokens, its problem, or the reason why it is dropped


class DocumentChunk(NamedTuple):
    number: int  # in the shard
    before: Any  # positions in the shard, as JSON
    after: Any
    outcomes: list[Outcome]

    def to_bytes(self) -> Any:
        sink, outcomes = pa.BufferOutputStream(), list(map(_describe, self.outcomes))
        write_part(sink, self.kept, {"chunk": [self.number, self.before, self.after], "outcomes": outcomes})
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "DocumentChunk":
        part = read_part(pa.py_buffer(data))
        kept, (number, before, after) = map(part.document, range(len(part.batch))), part.notes["chunk"]
        return cls(number, before, after, [_outcome(item, kept) for item in part.notes["outcomes"]])

    @property
    def kept(self) -> list[Tokens]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Tokens)]

    @property
    def counts(self) -> tuple[int, list[int]]:
        """The number of records, and the numbers of tokens of the documents that are kept."""
        return len(self.outcomes), [len(tokens.input_ids) for tokens in self.kept]


class Reading(NamedTuple):
    """A shard to read from chunk number `first` on; this chunk begins at `position`."""

    source: Source
    source_number: int
    shard: Shard
    shard_number: int
    with_summaries: bool
    first: int = 0
    position: Any = None

    @property
    def key(self) -> tuple[int, int]:
        return self.source_number, self.shard_number


def read_chunks(
    reading: Reading, encode: Encode, on_read: Callable[[str], object] = lambda where: None
) -> Iterator[DocumentChunk]:
    """Yields the chunks of a shard. Before a chunk is tokenised, calls `on_read` with its place."""
    number, position = reading.first, reading.position
    for records, after in reading.shard.chunks(position):
        on_read(f"{records[0][0]} to {records[-1][0]}")
        yield DocumentChunk(number, position, after, _encode(records, reading, encode))
        number, position = number + 1, after


def _encode(records: Sequence[Record], reading: Reading, encode: Encode) -> list[Outcome]:
    made = [make_document(record, reading.source, reading.with_summaries) for record in records]
    documents = [document for document in made if isinstance(document, Document)]
    try:
        encoded = iter(encode(documents) if documents else [])
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{_failing(documents, encode)}: {type(error).__name__}: {error}") from error
    outcomes = (next(encoded) if isinstance(item, Document) else item for item in made)
    source = reading.source_number
    return [outcome._replace(source=source) if isinstance(outcome, Tokens) else outcome for outcome in outcomes]


def _failing(documents: Sequence[Document], encode: Encode) -> str:
    """Returns the place of the document that can't be tokenised; the places of all if each can be by itself."""
    for document in documents:
        try:
            encode([document])
        except Exception:
            return document.where
    return f"{documents[0].where} to {documents[-1].where}"


def _describe(outcome: Outcome) -> list[str]:
    if isinstance(outcome, Problem):
        return ["problem", *outcome]
    return ["kept", outcome.remark] if isinstance(outcome, Tokens) else ["dropped", outcome]


def _outcome(item: list[str], kept: Iterator[Tokens]) -> Outcome:
    kind, *texts = item
    if kind == "kept":
        return next(kept)._replace(remark=texts[0])
    return texts[0] if kind == "dropped" else Problem(*texts)
