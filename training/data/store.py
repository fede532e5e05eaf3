"""Documents as tokens on disk, read by number, in parts that are written completely or not at all."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from .. import full_disk
from ..recipe import DocumentData, Source
from .documents import Document
from .shards import source_files

FINGERPRINTED = 16  # documents whose tokens ranks compare
FORMAT = 3  # raised when parts, or the tokens in them, change: folders of other formats are not read
FILES_FORMAT = 2  # raised when shards or chunks of files change, since positions count them
ALL = math.inf  # the amount of all documents
SCHEMA = pa.schema({"input_ids": pa.large_list(pa.int32()), "num_given": pa.int32(), "source": pa.int32()})


class Tokens(NamedTuple):
    """A document as tokens; the first `num_given` have no labels. A `remark` on a kept document is counted."""

    input_ids: np.ndarray
    num_given: int
    remark: str = ""
    source: int = 0  # its number among the sources


Encode = Callable[[Sequence[Document]], Sequence[Tokens | str]]  # the tokens, or the reason why the document is dropped


class Need(NamedTuple):
    """An amount of documents: the sum of their weights, to which `weigh` maps their numbers of tokens."""

    weigh: Callable[[np.ndarray], np.ndarray]
    amount: float  # `ALL`: however many there are
    unit: str = "tokens"  # of the weights
    documents: int = 0  # at least

    def weight(self, lengths: Sequence[int] | np.ndarray) -> int:
        return int(self.weigh(np.asarray(lengths, dtype=int)).sum())

    def prefix(self, lengths: np.ndarray) -> int:
        """Returns how many documents, from the first on, are enough; all if they are too few."""
        enough = int(np.searchsorted(np.cumsum(self.weigh(lengths)), self.amount)) + 1
        return min(max(enough, self.documents), len(lengths))


class Part(NamedTuple):
    batch: pa.RecordBatch  # with the columns of `SCHEMA`
    notes: dict[str, Any]

    def document(self, number: int) -> Tokens:
        input_ids, num_given, source = (column[number] for column in self.batch.columns)
        return Tokens(input_ids.values.to_numpy(), num_given.as_py(), source=source.as_py())


class Store:
    """Maps the prepared documents in a folder into memory, by number."""

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
        batches = [part.batch for part in self.parts]
        self._firsts = np.cumsum([0, *map(len, batches)])
        none = np.zeros(0, int)
        self.lengths = np.concatenate([none, *(batch["input_ids"].value_lengths().to_numpy() for batch in batches)])
        self.sources = np.concatenate([none, *(batch["source"].to_numpy() for batch in batches)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tokens:
        n = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self.parts[n].document(number - self._firsts[n])

    def fingerprint(self, first: int, last: int) -> str:
        """Returns a hash of the lengths of documents `first` to `last` - 1, and of the tokens of some of them."""
        digest = hashlib.sha256(self.lengths[first:last].astype(np.int64).tobytes())
        for number in np.linspace(first, last - 1, min(FINGERPRINTED, last - first)).astype(int):
            digest.update(self[int(number)].input_ids.astype(np.int64).tobytes())
        return digest.hexdigest()

    @property
    def notes(self) -> dict[str, Any]:
        """The state after the last part: the position in each source, whether they have ended, and counts."""
        return self.parts[-1].notes if self.parts else {"positions": None, "ended": False, "counts": {}}


def name_of(described: dict[str, Any]) -> str:
    """Returns the name of a folder: a hash of everything that its content depends on."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def folder_of(data: DocumentData, sources: Sequence[Source], tokenizer, **settings) -> Path:
    """Returns the folder of prepared documents."""
    files = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for source in sources
        if source.files is not None
        for path in source_files(source)
    ]
    described = {
        "format": FORMAT,
        "sources": [source.model_dump() for source in sources],
        "files": [FILES_FORMAT, *files] if files else [],
        "bad_documents": data.bad_documents,
        "tokenizer": [_rules_of(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id],
        **settings,
    }
    return data.prepared / name_of(described)


def _rules_of(tokenizer) -> Any:
    """Returns what decides the tokens of a text; of a tokenizer that is not fast: its class, files and options."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        with TemporaryDirectory() as folder:
            files = tokenizer.save_vocabulary(folder)
            contents = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
        options = {
            name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool | int | float)
        }
        return [type(tokenizer).__name__, tokenizer.get_vocab(), contents, options]
    # Truncation and padding are settings of the tokenizer's last call, not of the tokenizer.
    return json.loads(backend.to_str()) | {"truncation": None, "padding": None}


def part_name(number: int) -> str:
    return f"part-{number:05d}.arrow"


def write_part_file(path: Path, kept: Sequence[Tokens], notes: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    try:
        with pa.OSFile(str(partial), "wb") as file:
            write_part(file, kept, notes)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)  # it remains if the disk is full


def _read_part_file(path: Path) -> Part:
    try:
        return read_part(pa.memory_map(str(path)))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{path} is damaged ({why}): delete it and the parts after it, and they are prepared again."
        ) from error


def room_for(folder: Path) -> AbstractContextManager[None]:
    """Raises `ValueError` with the folder and the remedy if a disk or quota is full."""
    return full_disk.room_for(
        folder,
        "Make room, or set data.prepared to a folder on another disk, and start again: documents that are already "
        "prepared are kept.",
    )


def write_part(sink: Any, kept: Sequence[Tokens], notes: dict[str, Any]) -> None:
    """Writes documents and, as JSON, notes to one of Arrow's output streams."""
    ids = [tokens.input_ids.astype(np.int32, copy=False) for tokens in kept]
    columns = [ids, [tokens.num_given for tokens in kept], [tokens.source for tokens in kept]]
    schema = SCHEMA.with_metadata({"notes": json.dumps(notes)})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def read_part(source: Any) -> Part:
    """Reads a part from a memory map or a buffer."""
    reader = pa.ipc.open_file(source)
    if not reader.schema.equals(SCHEMA):
        raise ValueError(f"columns {reader.schema.names}, not {SCHEMA.names}")
    return Part(reader.get_batch(0), json.loads(reader.schema.metadata[b"notes"]))
