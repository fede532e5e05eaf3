"""Documents as tokens on disk, prepared once: after that, any of them is read by its number.

Parts are written completely or not at all, each with the reader's position after it, so a preparation that was
killed resumes, and ends with the same documents. The first process prepares, others wait.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from filelock import FileLock
from tqdm import tqdm

from ..recipe import DocumentData, Source
from .documents import Document, DocumentReader, Problem, good_documents, source_files

BATCH = 64  # documents tokenised at once
PART_TOKENS = 2**24  # of a part, about
PART_DOCUMENTS = 2**16  # read for a part: where most are dropped, a kill costs no more than that


class Tokens(NamedTuple):
    """A document as tokens; the first `num_given` have no labels. A `remark` is counted when the document is kept."""

    input_ids: np.ndarray
    num_given: int
    remark: str = ""


Encode = Callable[[Sequence[Document]], Sequence[Tokens | str]]  # the tokens, or the reason why the document is dropped


class Need(NamedTuple):
    """The documents that a caller needs: their weights, by their numbers of tokens, sum up to an amount."""

    weigh: Callable[[np.ndarray], np.ndarray]
    amount: int

    def prefix(self, lengths: np.ndarray) -> int:
        """The number of documents, from the first, that is enough; all of them where they are too few."""
        return min(int(np.searchsorted(np.cumsum(self.weigh(lengths)), self.amount)) + 1, len(lengths))


class Part(NamedTuple):
    values: np.ndarray
    ends: np.ndarray
    num_given: np.ndarray
    notes: dict[str, Any]


class Store:
    """The prepared documents in a folder, by number; memory-mapped."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.parts = [_read_part(path) for path in sorted(folder.glob("part-*.arrow"))]
        self._firsts = np.cumsum([0, *(len(part.ends) for part in self.parts)])
        self.lengths = np.concatenate([np.diff(part.ends, prepend=0) for part in self.parts] or [np.zeros(0, int)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tokens:
        n = int(np.searchsorted(self._firsts, number, side="right")) - 1
        part, index = self.parts[n], number - self._firsts[n]
        start = part.ends[index - 1] if index else 0
        return Tokens(part.values[start : part.ends[index]], int(part.num_given[index]))

    def fingerprint(self, first: int, last: int) -> str:
        """A hash of the lengths of documents `first` to `last - 1`: other documents have other lengths."""
        return hashlib.sha256(self.lengths[first:last].astype(np.int64).tobytes()).hexdigest()

    @property
    def notes(self) -> dict[str, Any]:
        """The state after the last part: the reader's position, whether the sources have ended, and counts."""
        return self.parts[-1].notes if self.parts else {"position": None, "ended": False, "counts": {}}


def folder_of(data: DocumentData, sources: Sequence[Source], tokenizer, **settings) -> Path:
    """The folder of prepared documents, named by a hash of everything that their tokens depend on."""
    files = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns]
        for source in sources
        if source.files is not None
        for path in source_files(source)
    ]
    # Truncation and padding are settings of the tokenizer's last call, not of the tokenizer.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    described = {
        "sources": [source.model_dump() for source in sources],
        "files": files,
        "bad_documents": data.bad_documents,
        "tokenizer": [backend, tokenizer.bos_token_id, tokenizer.eos_token_id],
        **settings,
    }
    return data.prepared / hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def prepare(
    folder: Path, data: DocumentData, sources: Sequence[Source], encode: Encode, need: Need, with_summaries: bool
) -> Store:
    """Reads and tokenises documents until enough are kept, or the sources end.

    Raises `ValueError` for the first document with a problem if `bad_documents` is "refuse", and where no
    document is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        store = Store(folder)
        preparation = _Preparation(store, data, need)
        if not preparation.finished:
            preparation.run(DocumentReader(sources, with_summaries, store.notes["position"]), encode)
            store = Store(folder)
        _summarize(store)
    if not len(store):
        raise ValueError(f"no document is left to train on: {store.notes['counts']}; see {folder / 'summary.json'}.")
    return store


class _Preparation:
    """The progress of a preparation."""

    def __init__(self, store: Store, data: DocumentData, need: Need):
        self.folder, self.data, self.need = store.folder, data, need
        self.num_parts, self.num_kept = len(store.parts), len(store)
        self.weight = int(need.weigh(store.lengths).sum())
        self.ended, self.counts = store.notes["ended"], Counter(store.notes["counts"])

    @property
    def finished(self) -> bool:
        full = self.data.max_documents is not None and self.num_kept >= self.data.max_documents
        return self.ended or full or self.weight >= self.need.amount

    def run(self, reader: DocumentReader, encode: Encode) -> None:
        records = iter(reader)
        with tqdm(desc="preparing documents", unit=" documents", initial=self.counts["read"]) as bar:
            while not self.finished:
                kept: list[Tokens] = []
                problems: list[Problem] = []
                num_tokens, last = 0, self.counts["read"] + PART_DOCUMENTS
                while not self.finished and num_tokens < PART_TOKENS and self.counts["read"] < last:
                    batch = list(islice(records, BATCH))
                    self.ended = len(batch) < BATCH
                    skipped: list[Problem] = []
                    option = "data.bad_documents=skip"
                    documents = list(good_documents(batch, self.data.bad_documents, skipped.append, option))
                    new = self._encode(documents, skipped, encode)
                    problems += skipped
                    kept += new
                    num_tokens += sum(len(tokens.input_ids) for tokens in new)
                    bar.update(len(batch))
                notes = {
                    "position": reader.position,
                    "ended": self.ended,
                    "counts": dict(self.counts),
                    "problems": [problem.__dict__ for problem in problems],
                }
                _write_part(self.folder / f"part-{self.num_parts:05d}.arrow", kept, notes)
                self.num_parts += 1

    def _encode(self, documents: Sequence[Document], skipped: Sequence[Problem], encode: Encode) -> list[Tokens]:
        encoded = encode(documents) if documents else []
        kept = [item for item in encoded if not isinstance(item, str)]
        lengths = np.array([len(tokens.input_ids) for tokens in kept], dtype=int)
        self.counts.update(item for item in encoded if isinstance(item, str))
        self.counts.update(tokens.remark for tokens in kept if tokens.remark)
        self.counts.update(problem.kind for problem in skipped)
        num_read = len(documents) + len(skipped)
        self.counts.update({"read": num_read, "kept": len(kept), "tokens kept": int(lengths.sum())})
        self.num_kept += len(kept)
        self.weight += int(self.need.weigh(lengths).sum())
        return kept


def _write_part(path: Path, kept: Sequence[Tokens], notes: dict[str, Any]) -> None:
    lists = pa.array([tokens.input_ids.astype(np.int32) for tokens in kept], type=pa.large_list(pa.int32()))
    given = pa.array([tokens.num_given for tokens in kept], type=pa.int32())
    schema = pa.schema({"input_ids": lists.type, "num_given": given.type}, metadata={"notes": json.dumps(notes)})
    partial = path.with_suffix(".partial")
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch([lists, given], schema=schema))
    partial.rename(path)


def _read_part(path: Path) -> Part:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    batch = reader.get_batch(0)
    lists = batch["input_ids"]
    notes = json.loads(reader.schema.metadata[b"notes"])
    return Part(lists.values.to_numpy(), lists.offsets.to_numpy()[1:], batch["num_given"].to_numpy(), notes)


def _summarize(store: Store) -> None:
    """Writes `problems.jsonl` and `summary.json`, and prints the counts of documents, where they have changed."""
    counts, summary = store.notes["counts"], store.folder / "summary.json"
    text = json.dumps(counts, indent=2)
    if summary.exists() and summary.read_text() == text:
        return
    problems = [problem for part in store.parts for problem in part.notes["problems"]]
    (store.folder / "problems.jsonl").write_text("".join(json.dumps(item) + "\n" for item in problems))
    summary.write_text(text)  # last: a run that is killed before this writes both again
    others = ", ".join(
        f"{count:,} {what}" for what, count in counts.items() if what not in ("read", "kept", "tokens kept")
    )
    print(
        f"{store.folder}: {counts['read']:,} documents read, {counts['kept']:,} kept with "
        f"{counts['tokens kept']:,} tokens" + (f"; {others}" if others else ""),
        flush=True,
    )
