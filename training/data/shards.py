"""The shards of a source: runs of local files, or the shards of a data set of the hub.

A process can read any shard without the others, in chunks of records. A source is the sequence of its shards. Of
Parquet files and streams only the columns with the fields that are asked for are read: others may hold what Python
can't, such as dates after the year 9999.
"""

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from condense.hub.loading import first_line
from condense.utils.files import decode_text

from ..recipe import Source
from .grouping import groups

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".txt", ".jsonl", ".parquet")
CHUNK = 64  # records
CHUNK_CHARACTERS = 2**22  # of a file's chunk, approximately: memory holds a few chunks and at least one document
TEXT_FILES, TEXT_BYTES = 16, 2**22  # of one document each, in a shard: at most, and approximately


class Problem(NamedTuple):
    """A document that can't be used: `kind` is counted, `detail` helps to correct it."""

    where: str
    kind: str
    detail: str = ""


Record = tuple[str, dict[str, Any] | Problem]  # where, fields


@dataclass(frozen=True)
class FileShard:
    """Files that are read one after the other. A position is a number of records."""

    paths: tuple[Path, ...]
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.paths[0])

    def chunks(self, position: int | None = None) -> Iterator[tuple[list[Record], int]]:
        """Yields records, and the position after them."""
        count = position or 0
        records = islice(_file_records(self.paths, self.fields), count, None)
        for chunk in groups(records, _num_characters, CHUNK_CHARACTERS, CHUNK):
            count += len(chunk)
            yield chunk, count


@dataclass(frozen=True)
class HubShard:
    """A shard of a streamed data set. A position is the state of the shard's stream and a number of records."""

    data_set: str
    stream: Any  # of all shards
    number: int
    fields: tuple[str, ...]

    def __str__(self) -> str:
        count = self.stream.num_shards
        return self.data_set if count == 1 else f"{self.data_set}:shard {self.number} of {count}"

    def chunks(self, position: dict[str, Any] | None = None) -> Iterator[tuple[list[Record], dict[str, Any]]]:
        """Yields records, and the position after them. Raises `ValueError` for rows that can't be read."""
        stream, count, name = self.stream.shard(self.stream.num_shards, self.number), 0, str(self)
        names = stream.column_names or ()  # None for a stream whose columns are not known before its rows
        if names:
            columns = columns_of(names, self.fields)
            if not columns:
                raise ValueError(
                    f"{self}: of {', '.join(map(repr, self.fields))} it has no field; there are "
                    f"{', '.join(map(repr, names))}: name the right one with text=FIELD of the source."
                )
            stream = stream.select_columns(columns)
        if position is not None:
            count = position["count"]
            stream.load_state_dict(position["stream"])
        records = iter(stream)
        while rows := self._next(records, count):
            chunk: list[Record] = [
                (f"{name}:row {number}", dict.fromkeys(names) | fields) for number, fields in enumerate(rows, count)
            ]
            count += len(rows)
            yield chunk, {"count": count, "stream": stream.state_dict()}

    def _next(self, records: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
        try:
            return list(islice(records, CHUNK))
        except (ValueError, OverflowError, LookupError) as error:  # a stream can't go on after such a row
            raise ValueError(
                f"{self}: one of the rows {count} to {count + CHUNK - 1} can't be read "
                f"({first_line(error)}). Copy the data set without the row to files, or leave it out."
            ) from error


Shard = FileShard | HubShard


def open_shards(source: Source, fields: Sequence[str]) -> list[Shard]:
    """Returns the shards of a source, in order, for records with at least the values of `fields`.

    Other fields may be null. Raises `ValueError` as `source_files` does.
    """
    if source.hub is None:
        return list(_file_shards(source_files(source), tuple(fields)))
    from datasets import load_dataset

    split = source.split or "train"
    stream = load_dataset(source.hub, source.name, split=split, revision=source.revision, streaming=True)
    return [HubShard(source.hub, stream, number, tuple(fields)) for number in range(stream.num_shards)]


def columns_of(names: Sequence[str], fields: Iterable[str]) -> list[str]:
    """Returns the columns that can hold one of the fields: for `content.text`, this one and `content`."""
    return [name for name in names if any(f"{field}.".startswith(f"{name}.") for field in fields)]


def _file_shards(paths: Iterable[Path], fields: tuple[str, ...]) -> Iterator[FileShard]:
    """Yields a shard for each file of many documents, and for each run of files of one document."""
    for suffix, group in groupby(paths, lambda path: path.suffix):
        most = TEXT_FILES if suffix == ".txt" else 1
        for run in groups(group, lambda path: path.stat().st_size, TEXT_BYTES, most):
            yield FileShard(tuple(run), fields)


def _num_characters(record: Record) -> int:
    _, fields = record
    return 0 if isinstance(fields, Problem) else sum(len(value) for value in fields.values() if isinstance(value, str))


def source_files(source: Source) -> list[Path]:
    """Returns the files of a local source, each once, in order. Raises `ValueError` for none, or an unknown kind."""
    assert source.files is not None
    named = Path(source.files)  # also one with brackets in its name
    found = [named] if named.is_file() else map(Path, sorted(set(glob.glob(source.files, recursive=True))))
    paths = [path for path in found if path.is_file()]
    if not paths:
        raise ValueError(f"files={source.files!r} names no file.")
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: documents are read from {', '.join(SUFFIXES)}, not from {path.suffix!r}.")
    return paths


def _file_records(paths: Sequence[Path], fields: Sequence[str]) -> Iterator[Record]:
    for path in paths:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path, fields)
        else:
            yield from {".txt": _text_file, ".jsonl": _json_lines}[path.suffix](path)


def _text_file(path: Path) -> Iterator[Record]:
    data = path.read_bytes()
    try:
        yield str(path), {"text": decode_text(data)}
    except UnicodeDecodeError as error:
        where = f"{path}:{data.count(bytes([10]), 0, error.start) + 1}"
        yield where, wrong_encoding(where, error)


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue  # as the format allows
            try:
                fields = json.loads(decode_text(line))
            except UnicodeDecodeError as error:
                yield where, wrong_encoding(where, error)
            except (ValueError, RecursionError) as error:
                yield where, Problem(where, "broken JSON", str(error))
            else:
                is_object = isinstance(fields, dict)
                yield where, fields if is_object else Problem(where, "no JSON object", type(fields).__name__)


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    """Yields rows with all columns; the values of those that hold none of the fields are not read, and None."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                yield str(path), Problem(str(path), "unreadable Parquet", f"two columns are named {twice[0]!r}")
                return
            columns = columns_of(names, fields)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in range(batch.num_rows):
                    values = {name: _to_python(batch[name][row]) for name in columns}
                    yield f"{path}:row {number}", dict.fromkeys(names) | values
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        where = f"{path}:row {number}"
        yield where, Problem(where, "unreadable Parquet", str(error).splitlines()[0])


def _to_python(value: "pyarrow.Scalar") -> Any:
    """Returns a value as Python's. What Python can't hold stays a scalar, such as a date after the year 9999.

    Bytes that are not UTF-8 become surrogates.
    """
    import pyarrow

    try:
        return value.as_py()
    except (ValueError, OverflowError, LookupError):  # the last one for unknown time zones
        if isinstance(value, pyarrow.StringScalar):  # Parquet does not check text
            return value.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
        if isinstance(value, pyarrow.StructScalar):
            return {name: _to_python(inner) for name, inner in value.items()}
        if isinstance(value, pyarrow.ListScalar) and not isinstance(value, pyarrow.MapScalar):
            return [_to_python(inner) for inner in value]
        return value


def wrong_encoding(where: str, error: UnicodeError) -> Problem:
    return Problem(where, "wrong encoding", f"not UTF-8: {error.args[-1]}")
