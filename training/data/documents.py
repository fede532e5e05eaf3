"""Documents of a recipe's sources, one by one, and the problems of those that can't be read.

Several sources take turns until each has ended. A reader can be resumed from a recorded position.
"""

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe import BadDocuments, Source

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Document:
    """`summary` is empty where none is asked for. `where` names file and line, or file and row."""

    where: str
    text: str
    summary: str = ""


@dataclass(frozen=True)
class Problem:
    """A document that can't be used: `kind` is counted, `detail` helps to correct it."""

    where: str
    kind: str
    detail: str = ""


def good_documents(
    records: Iterable[Document | Problem],
    bad_documents: BadDocuments,
    on_skip: Callable[[Problem], object] = lambda problem: None,
    option: str = "",
) -> Iterator[Document]:
    """The documents among `records`: the one policy for bad ones, of training and of every evaluation.

    `on_skip` is called with each problem that is skipped. Where problems are refused, raises `ValueError` for the first
    one; `option`, such as `data.bad_documents=skip`, is the option that skips it ("" if there is none).
    """
    for record in records:
        if isinstance(record, Document):
            yield record
        elif bad_documents == "skip":
            on_skip(record)
        else:
            remedy = f"Correct it, or leave such documents out with {option}." if option else "Correct or remove it."
            raise ValueError(f"{record.where}: {record.kind} ({record.detail}). {remedy}")


Record = tuple[str, dict[str, Any] | Problem]  # where, fields


class DocumentReader:
    """Iterates over documents and problems; `position` is JSON, and records how far it has read."""

    def __init__(self, sources: Sequence[Source], with_summaries: bool, position: list | None = None):
        states = position or [None] * len(sources)
        self._readers = [_SourceReader(source, state) for source, state in zip(sources, states, strict=True)]
        self._fields = [(source.text, source.summary if with_summaries else None) for source in sources]

    @property
    def position(self) -> list:
        return [reader.position for reader in self._readers]

    def __iter__(self) -> Iterator[Document | Problem]:
        # The reader that has read least is next: so sources take turns, also after a position was restored.
        while open_readers := [n for n, reader in enumerate(self._readers) if not reader.ended]:
            turn = min(open_readers, key=lambda n: self._readers[n].num_read)
            record = self._readers[turn].read()
            if record is not None:
                yield _document(*record, *self._fields[turn])


class _SourceReader:
    def __init__(self, source: Source, position: dict | None):
        self.num_read, self.ended = 0, False
        self._stream: Any = None
        if source.hub is None:
            self._records = _file_records(source_files(source))
        else:
            self._stream = _open_hub(source)
            if position is not None:
                self._stream.load_state_dict(position["stream"])
            self._records = _hub_records(source, self._stream, 0 if position is None else position["num_read"])
        if position is not None:
            self.ended = position["ended"]
            if self._stream is None:
                for _ in range(position["num_read"]):
                    next(self._records)
            self.num_read = position["num_read"]

    @property
    def position(self) -> dict:
        stream = {} if self._stream is None else {"stream": self._stream.state_dict()}
        return {"num_read": self.num_read, "ended": self.ended, **stream}

    def read(self) -> Record | None:
        record = next(self._records, None)
        if record is None:
            self.ended = True
        else:
            self.num_read += 1
        return record


def source_files(source: Source) -> list[Path]:
    """The files of a local source, in order. Raises `ValueError` where there are none or of an unknown kind."""
    assert source.files is not None
    named = Path(source.files)  # also one with brackets in its name
    found = [named] if named.is_file() else map(Path, sorted(glob.glob(source.files, recursive=True)))
    paths = [path for path in found if path.is_file()]
    if not paths:
        raise ValueError(f"files={source.files!r} names no file.")
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: documents are read from {', '.join(SUFFIXES)}, not from {path.suffix!r}.")
    return paths


def _file_records(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        yield from {".txt": _text_file, ".jsonl": _json_lines, ".parquet": _parquet_rows}[path.suffix](path)


def _text_file(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    try:
        yield str(path), {"text": data.decode("utf-8")}
    except UnicodeDecodeError as error:
        where = f"{path}:{data.count(bytes([10]), 0, error.start) + 1}"
        yield where, _wrong_encoding(where, error)


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue  # as the format allows
            try:
                fields = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield where, _wrong_encoding(where, error)
            except (ValueError, RecursionError) as error:
                yield where, Problem(where, "broken JSON", str(error))
            else:
                is_object = isinstance(fields, dict)
                yield where, fields if is_object else Problem(where, "no JSON object", type(fields).__name__)


def _parquet_rows(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in range(batch.num_rows):
                    where = f"{path}:row {number}"
                    try:
                        yield where, {name: batch[name][row].as_py() for name in batch.schema.names}
                    except UnicodeDecodeError as error:  # Parquet does not check text
                        yield where, _wrong_encoding(where, error)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        where = f"{path}:row {number}"
        yield where, Problem(where, "unreadable Parquet", str(error).splitlines()[0])


def _wrong_encoding(where: str, error: UnicodeError) -> Problem:
    return Problem(where, "wrong encoding", f"not UTF-8: {error.args[-1]}")


def _open_hub(source: Source):
    from datasets import load_dataset

    split = source.split or "train"
    return load_dataset(source.hub, source.name, split=split, revision=source.revision, streaming=True)


def _hub_records(source: Source, stream, first: int) -> Iterator[Record]:
    for number, fields in enumerate(stream, first):
        yield f"{source.hub}:row {number}", fields


def _document(
    where: str, fields: dict[str, Any] | Problem, text_field: str, summary_field: str | None
) -> Document | Problem:
    if isinstance(fields, Problem):
        return fields
    if where.endswith(".txt"):
        text_field = "text"
    values = []
    for name in (text_field, summary_field):
        if name is None:
            continue
        if fields.get(name) is None:
            return Problem(where, "missing field", f"{name!r}; there are {', '.join(map(repr, fields))}")
        value = fields[name]
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = " ".join(value) if name == text_field else next(iter(value), "")
        if not isinstance(value, str):
            return Problem(where, "wrong type", f"{name!r} is {type(value).__name__}, not text")
        if not value.strip():
            return Problem(where, "empty document", repr(name))
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair, which no tokenizer takes
            return _wrong_encoding(where, error)
        values.append(value)
    return Document(where, *values)
