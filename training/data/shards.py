"""The shards of a source: runs of local files, or the shards of a data set of the hub.

A process can read any shard without the others, in chunks of records. A source is the sequence of its shards.
"""

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from condense.files import decode_text

from ..recipe import Source

SUFFIXES = (".txt", ".jsonl", ".parquet")
CHUNK = 64  # records
TEXT_FILES = 16  # of one document each, in a shard


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

    def __str__(self) -> str:
        return str(self.paths[0])

    def chunks(self, position: int | None = None) -> Iterator[tuple[list[Record], int]]:
        """Yields records, and the position after them."""
        count = position or 0
        records = islice(_file_records(self.paths), count, None)
        while chunk := list(islice(records, CHUNK)):
            count += len(chunk)
            yield chunk, count


@dataclass(frozen=True)
class HubShard:
    """A shard of a streamed data set. A position is the state of the shard's stream and a number of records."""

    data_set: str
    stream: Any  # of all shards
    number: int

    def __str__(self) -> str:
        count = self.stream.num_shards
        return self.data_set if count == 1 else f"{self.data_set}:shard {self.number} of {count}"

    def chunks(self, position: dict[str, Any] | None = None) -> Iterator[tuple[list[Record], dict[str, Any]]]:
        """Yields records, and the position after them."""
        stream, count, name = self.stream.shard(self.stream.num_shards, self.number), 0, str(self)
        if position is not None:
            count = position["count"]
            stream.load_state_dict(position["stream"])
        records = iter(stream)
        while rows := list(islice(records, CHUNK)):
            chunk: list[Record] = [(f"{name}:row {number}", fields) for number, fields in enumerate(rows, count)]
            count += len(rows)
            yield chunk, {"count": count, "stream": stream.state_dict()}


Shard = FileShard | HubShard


def open_shards(source: Source) -> list[Shard]:
    """Returns the shards of a source, in order. Raises `ValueError` as `source_files` does."""
    if source.hub is None:
        return list(_file_shards(source_files(source)))
    from datasets import load_dataset

    split = source.split or "train"
    stream = load_dataset(source.hub, source.name, split=split, revision=source.revision, streaming=True)
    return [HubShard(source.hub, stream, number) for number in range(stream.num_shards)]


def _file_shards(paths: Iterable[Path]) -> Iterator[FileShard]:
    """Yields a shard for each file of many documents, and for each run of files of one document."""
    for suffix, group in groupby(paths, lambda path: path.suffix):
        size = TEXT_FILES if suffix == ".txt" else 1
        while run := tuple(islice(group, size)):
            yield FileShard(run)


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


def _file_records(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        yield from {".txt": _text_file, ".jsonl": _json_lines, ".parquet": _parquet_rows}[path.suffix](path)


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


def _parquet_rows(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                yield str(path), Problem(str(path), "unreadable Parquet", f"two columns are named {twice[0]!r}")
                return
            for batch in file.iter_batches(batch_size=256):
                for row in range(batch.num_rows):
                    where = f"{path}:row {number}"
                    try:
                        yield where, {name: batch[name][row].as_py() for name in names}
                    except UnicodeDecodeError as error:  # Parquet does not check text
                        yield where, wrong_encoding(where, error)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        where = f"{path}:row {number}"
        yield where, Problem(where, "unreadable Parquet", str(error).splitlines()[0])


def wrong_encoding(where: str, error: UnicodeError) -> Problem:
    return Problem(where, "wrong encoding", f"not UTF-8: {error.args[-1]}")
