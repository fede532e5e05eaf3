"""Documents as tokens on disk, read by number. A part of them is written completely or not at all."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..recipe import DocumentData, Source
from .documents import Document
from .former import changed_frame, check_no_former
from .shards import source_files

FINGERPRINTED = 16  # documents whose tokens ranks compare
FORMAT = 2  # of a part; folders of other formats are not read


class Tokens(NamedTuple):
    """A document as tokens; the first `num_given` have no labels. A `remark` is counted when the document is kept."""

    input_ids: np.ndarray
    num_given: int
    remark: str = ""
    source: int = 0  # its number among the sources


Encode = Callable[[Sequence[Document]], Sequence[Tokens | str]]  # the tokens, or the reason why the document is dropped


class Need(NamedTuple):
    """An amount of documents: the sum of their weights. `weigh` maps their numbers of tokens to weights."""

    weigh: Callable[[np.ndarray], np.ndarray]
    amount: int
    unit: str = "tokens"  # of the weights

    def prefix(self, lengths: np.ndarray) -> int:
        """The number of documents, from the first, that is enough; all of them where they are too few."""
        return min(int(np.searchsorted(np.cumsum(self.weigh(lengths)), self.amount)) + 1, len(lengths))


class Part(NamedTuple):
    values: np.ndarray
    ends: np.ndarray
    num_given: np.ndarray
    source: np.ndarray
    notes: dict[str, Any]

    def document(self, number: int) -> Tokens:
        start = self.ends[number - 1] if number else 0
        values, given = self.values[start : self.ends[number]], int(self.num_given[number])
        return Tokens(values, given, source=int(self.source[number]))


class Store:
    """The prepared documents in a folder, by number; memory-mapped."""

    def __init__(self, folder: Path):
        """Raises `ValueError` if a part is missing before others, or damaged."""
        self.folder = folder
        paths = sorted(folder.glob("part-*.arrow"))
        for number, path in enumerate(paths):
            if path.name != part_name(number):
                raise ValueError(
                    f"{folder / part_name(number)} is missing, and there are later parts of these documents: delete "
                    "the folder, and they are prepared again."
                )
        self.parts = [_read_part_file(path) for path in paths]
        self._firsts = np.cumsum([0, *(len(part.ends) for part in self.parts)])
        self.lengths = np.concatenate([np.diff(part.ends, prepend=0) for part in self.parts] or [np.zeros(0, int)])
        self.sources = np.concatenate([part.source for part in self.parts] or [np.zeros(0, int)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tokens:
        n = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.parts[n].document(number - self._firsts[n])

    def fingerprint(self, first: int, last: int) -> str:
        """A hash of the lengths of documents `first` to `last - 1`, and of the tokens of some of them."""
        digest = hashlib.sha256(self.lengths[first:last].astype(np.int64).tobytes())
        for number in np.linspace(first, last - 1, min(FINGERPRINTED, last - first)).astype(int):
            digest.update(self[int(number)].input_ids.astype(np.int64).tobytes())
        return digest.hexdigest()

    @property
    def notes(self) -> dict[str, Any]:
        """The state after the last part: the position in each source, whether they have ended, and counts."""
        return self.parts[-1].notes if self.parts else {"positions": None, "ended": False, "counts": {}}


def folder_of(data: DocumentData, sources: Sequence[Source], tokenizer, **settings) -> Path:
    """The folder of prepared documents, named by a hash of everything that their tokens depend on.

    Raises `ValueError` where a former version has prepared them with other tokens.
    """
    files = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for source in sources
        if source.files is not None
        for path in source_files(source)
    ]
    # Truncation and padding are settings of the tokenizer's last call, not of the tokenizer.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    described = {
        "format": FORMAT,
        "sources": [source.model_dump() for source in sources],
        "files": files,
        "bad_documents": data.bad_documents,
        "tokenizer": [backend, tokenizer.bos_token_id, tokenizer.eos_token_id],
        **settings,
    }

    def folder(described: dict[str, Any]) -> Path:
        return data.prepared / hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    if frame := changed_frame(tokenizer, settings.get("task")):
        check_no_former(folder(described), "with other tokens around each text")
        return folder(described | {"frame": frame})
    return folder(described)


def part_name(number: int) -> str:
    return f"part-{number:05d}.arrow"


def write_part_file(path: Path, kept: Sequence[Tokens], notes: dict[str, Any]) -> None:
    """Writes a part completely or not at all."""
    partial = path.with_suffix(".partial")
    try:
        with pa.OSFile(str(partial), "wb") as file:
            write_part(file, kept, notes)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)  # of a full disk


def _read_part_file(path: Path) -> Part:
    try:
        return read_part(pa.memory_map(str(path)))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{path} is damaged ({why}): delete it and the parts after it, and they are prepared again."
        ) from error


@contextmanager
def room_for(folder: Path) -> Iterator[None]:
    """Raises `ValueError` with the folder and the remedy if a disk or quota is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ValueError(
            f"{folder} can't be written: {os.strerror(error.errno)}. Make room, or set data.prepared to a folder on "
            "another disk, and start again: what is prepared already is kept."
        ) from error


def write_part(sink: Any, kept: Sequence[Tokens], notes: dict[str, Any]) -> None:
    """Writes documents and, as JSON, notes to one of Arrow's output streams."""
    columns = {
        "input_ids": pa.array([tokens.input_ids.astype(np.int32) for tokens in kept], type=pa.large_list(pa.int32())),
        "num_given": pa.array([tokens.num_given for tokens in kept], type=pa.int32()),
        "source": pa.array([tokens.source for tokens in kept], type=pa.int32()),
    }
    fields = {name: column.type for name, column in columns.items()}
    schema = pa.schema(fields, metadata={"notes": json.dumps(notes)})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(columns.values()), schema=schema))


def read_part(source: Any) -> Part:
    """A part from a memory map or a buffer."""
    reader = pa.ipc.open_file(source)
    batch = reader.get_batch(0)
    lists = batch["input_ids"]
    notes = json.loads(reader.schema.metadata[b"notes"])
    num_given, sources = (batch[name].to_numpy() for name in ("num_given", "source"))
    return Part(lists.values.to_numpy(), lists.offsets.to_numpy()[1:], num_given, sources, notes)
