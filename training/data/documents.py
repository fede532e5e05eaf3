"""Documents of a recipe's sources, one by one, and problems of records that can't be read.

Several sources take turns until each has ended.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from condense.utils.fields import MISSING, field_names, find_field

from ..recipe import BadDocuments, Source
from .shards import Problem, Record, open_shards, wrong_encoding


class Document(NamedTuple):
    """`summary` is empty unless it is asked for. `where` names file and line, or file and row."""

    where: str
    text: str
    summary: str = ""


T = TypeVar("T")


def good_documents(
    records: Iterable[T | Problem],
    bad_documents: BadDocuments,
    on_skip: Callable[[Problem], object] = lambda problem: None,
    option: str = "",
) -> Iterator[T]:
    """Yields the documents among `records`. Training and evaluations share this policy for bad documents.

    Calls `on_skip` with each problem that is skipped. If problems are refused, raises `ValueError` for the first one.
    The message names the `option` that skips it, such as `data.bad_documents=skip` ("" if there is none).
    """
    for record in records:
        if not isinstance(record, Problem):
            yield record
        elif bad_documents == "skip":
            on_skip(record)
        else:
            remedy = f"Correct it, or leave such documents out with {option}." if option else "Correct or remove it."
            raise ValueError(f"{record.where}: {record.kind} ({record.detail}). {remedy}")


def take_turns(readers: Sequence[Iterator[T]], num_read: Sequence[int] | None = None) -> Iterator[T]:
    """Yields documents of several readers: next is the reader that has read least, `num_read` before included."""
    counts = dict(enumerate(num_read or [0] * len(readers)))
    while counts:
        turn = min(counts, key=lambda number: counts[number])
        try:
            record = next(readers[turn])
        except StopIteration:
            del counts[turn]
        else:
            counts[turn] += 1
            yield record


def read_documents(sources: Sequence[Source], with_summaries: bool) -> Iterator[Document | Problem]:
    """Yields documents and problems of sources that take turns. Raises `ValueError` as `open_shards` does."""
    for document in take_turns([_documents(source, with_summaries) for source in sources]):
        if not isinstance(document, str):
            yield document


def _documents(source: Source, with_summaries: bool) -> Iterator[Document | Problem | str]:
    for shard in open_shards(source, used_fields(source, with_summaries)):
        for records, _ in shard.chunks():
            for record in records:
                yield make_document(record, source, with_summaries)


def used_fields(source: Source, with_summaries: bool) -> list[str]:
    """Returns the names of the fields that `make_document` reads."""
    return [*source.at_least, source.text, *([source.summary] if with_summaries else [])]


def make_document(record: Record, source: Source, with_summaries: bool) -> Document | Problem | str:
    """Returns a record's document, its problem, or the reason why it is dropped.

    Raises `ValueError` if the source has a lowest value for a field that the record does not have.
    """
    where, fields = record
    if isinstance(fields, Problem):
        return fields
    for name, lowest in source.at_least.items():
        value = find_field(fields, name)
        if value is MISSING:
            # Not a problem to be skipped: a whole data set would be streamed, and nothing kept.
            raise ValueError(
                f"{where}: at_least names {name!r}, and there are {field_names(fields)}: name a numeric field "
                "of the source, or leave at_least out."
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            return Problem(where, "wrong type", f"{name!r} is {type(value).__name__}, not a number")
        if not value >= lowest:  # NaN reaches no value
            return f"{name} under {lowest:g}"
    text_field = "text" if where.endswith(".txt") else source.text
    values = []
    for key, name in (("text", text_field), ("summary", source.summary))[: 1 + with_summaries]:
        value = find_field(fields, name)
        if value is None:
            return Problem(where, "missing field", f"{name!r} is null")
        if value is MISSING:
            remedy = f"name the right one with {key}=FIELD of the source, or --{key}-field in an evaluation"
            return Problem(where, "missing field", f"{name!r}; there are {field_names(fields)}: {remedy}")
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = " ".join(value) if key == "text" else next(iter(value), "")
        if not isinstance(value, str):
            return Problem(where, "wrong type", f"{name!r} is {type(value).__name__}, not text")
        if not value.strip():
            return Problem(where, "empty document", repr(name))
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair, which no tokenizer takes
            return wrong_encoding(where, error)
        values.append(value)
    return Document(where, *values)
