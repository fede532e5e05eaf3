"""Prepares documents: reads and tokenises them once, into a folder that training then reads by number.

Each part records the position after it, so a preparation that was killed resumes, and ends with the same documents.
One process prepares, and others wait for it. With worker processes the result is the same to the byte: see `workers`.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from condense.utils.progress import ProgressBar

from ..recipe import DocumentData, Source, TextData
from .chunks import DocumentChunk, Outcome, Reading, read_chunks
from .documents import good_documents, take_turns, used_fields
from .grouping import groups
from .shards import Problem, open_shards
from .store import ALL, Encode, Need, Store, Tokens, part_name, room_for, write_part_file
from .workers import Needed, Workers

BATCH = 64  # documents between two checks of whether more are needed, or fewer with the tokens of a part
PART_TOKENS = 2**24  # of a part, approximately
UNMERGED = "unmerged"  # the folder of chunks that worker processes have written, until they are merged into parts
PART_DOCUMENTS = 2**16  # read for a part, at most: a kill loses no more if most documents are dropped
JUDGED_AFTER = 16  # documents read from a source; if none is kept, the source is refused
ESTIMATE_AFTER_S = 10.0  # a run that prepares for longer prints an estimate of the time


def prepare(
    folder: Path,
    data: DocumentData,
    sources: Sequence[Source],
    make_encode: Callable[[], Encode],
    need: Need,
    num_workers: int = 0,
) -> Store:
    """Reads and tokenises documents until enough are kept, or the sources end.

    `num_workers` processes read different shards; 0 reads in this process. `make_encode` must be picklable. Raises
    `ValueError` for the first bad document if `bad_documents` is "refuse", and if no document is left.
    """
    with room_for(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with room_for(folder), FileLock(folder / ".lock"):
        store = Store(folder)
        preparation = _Preparation(store, data, need, num_workers)
        if not preparation.finished:
            preparation.run(sources, make_encode)
            store = Store(folder)
        shutil.rmtree(folder / UNMERGED, ignore_errors=True)
        _summarize(store)
    if not len(store):
        raise ValueError(f"no document is left to train on: {store.notes['counts']}; see {folder / 'summary.json'}.")
    _check_sources(store)
    return store


def _check_sources(store: Store) -> None:
    """Raises `ValueError` for a source of which no document is kept, once enough of them were read."""
    for number, described in enumerate(store.notes.get("sources", [])):
        counts = described["counts"]
        read = sum(counts.values())
        if number not in store.sources and (described["ended"] or read >= JUDGED_AFTER):
            raise ValueError(
                f"source {described['source']} gives no document: of {read:,} read none is kept "
                f"({_in_words(counts) or 'it is empty'}); see "
                f"{store.folder / 'problems.jsonl'}. Correct the source or its fields, or leave it out."
            )


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


class Position(NamedTuple):
    """A position in a source: a shard, its chunk, and the numbers of records read of this chunk and of the source."""

    shard: int = 0
    chunk: int = 0
    before: Any = None  # the chunk's position in the shard
    taken: int = 0
    num_read: int = 0


class _Merged:
    """The outcomes of one source's records, shard after shard."""

    def __init__(self, source: Source, number: int, with_summaries: bool, position: Position, counts: dict[str, Any]):
        self.source, self.number, self.with_summaries, self.position = source, number, with_summaries, position
        self.shards = open_shards(source, used_fields(source, with_summaries))
        self.counts, self.ended = Counter(counts.get("counts", {})), counts.get("ended", False)

    def readings(self) -> list[Reading]:
        """Returns the shards that are not completely read; the first one begins at the chunk of the position."""
        readings = (
            Reading(self.source, self.number, shard, shard_number, self.with_summaries)
            for shard_number, shard in enumerate(self.shards)
        )
        first, *others = islice(readings, self.position.shard, None)
        return [first._replace(first=self.position.chunk, position=self.position.before), *others]

    def outcomes(self, chunks: Callable[[Reading], Iterator[DocumentChunk]]) -> Iterator[Outcome]:
        taken, num_read = self.position.taken, self.position.num_read
        for reading in self.readings():
            for chunk in chunks(reading):
                for outcome in chunk.outcomes[taken:]:
                    taken, num_read = taken + 1, num_read + 1
                    self.position = Position(reading.shard_number, chunk.number, chunk.before, taken, num_read)
                    self.counts[_kind(outcome)] += 1
                    yield outcome
                taken = 0
        self.ended = True

    def described(self) -> dict[str, Any]:
        """Returns the source's name, its documents counted by their outcome, and whether it has ended."""
        return {"source": self.source.label, "counts": dict(self.counts), "ended": self.ended}


def _kind(outcome: Outcome) -> str:
    return "kept" if isinstance(outcome, Tokens) else outcome if isinstance(outcome, str) else outcome.kind


def _num_tokens(outcome: Outcome) -> int:
    return len(outcome.input_ids) if isinstance(outcome, Tokens) else 0


def is_prepared(folder: Path, data: DocumentData, need: Need) -> bool:
    """Returns whether a preparation would find all documents that are needed in the folder."""
    return _Preparation(Store(folder), data, need, 0).finished


class _Preparation:
    """The progress of a preparation."""

    def __init__(self, store: Store, data: DocumentData, need: Need, num_workers: int):
        self.folder, self.data, self.need, self.num_workers = store.folder, data, need, num_workers
        self.num_parts, self.weight, self.notes = len(store.parts), need.weight(store.lengths), store.notes
        self.ended, self.counts = self.notes["ended"], Counter(self.notes["counts"])

    @property
    def finished(self) -> bool:
        full = self.data.max_documents is not None and self.counts["kept"] >= self.data.max_documents
        enough = self.weight >= self.need.amount and self.counts["kept"] >= self.need.documents
        return self.ended or full or enough

    def run(self, sources: Sequence[Source], make_encode: Callable[[], Encode]) -> None:
        positions = [Position(*position) for position in self.notes["positions"] or [()] * len(sources)]
        described = self.notes.get("sources") or [{}] * len(sources)  # folders of earlier versions have none
        with_summaries = not isinstance(self.data, TextData)
        given = zip(sources, positions, described, strict=True)
        merged = [_Merged(source, number, with_summaries, *rest) for number, (source, *rest) in enumerate(given)]
        progress = _Progress(self)
        with progress.bar:
            if self.num_workers:
                unmerged = self.folder / UNMERGED
                unmerged.mkdir(exist_ok=True)
                # In the order in which they are needed: the sources take turns.
                readings = sorted(
                    (reading for source in merged for reading in source.readings()),
                    key=lambda reading: reading.key[::-1],
                )
                needed = Needed(self.need, self.data.max_documents, BATCH, [len(source.shards) for source in merged])
                with Workers(unmerged, readings, make_encode, self.num_workers, needed, progress.add) as workers:
                    self._merge(merged, workers.chunks, workers.merged)
                return
            encode = make_encode()

            def chunks(reading: Reading) -> Iterator[DocumentChunk]:
                for chunk in read_chunks(reading, encode):
                    progress.add(*chunk.counts)
                    yield chunk

            self._merge(merged, chunks, lambda source, shard: None)

    def _merge(
        self,
        merged: Sequence[_Merged],
        chunks: Callable[[Reading], Iterator[DocumentChunk]],
        on_merged: Callable[[int, int], object],
    ) -> None:
        """Writes parts. After each one, calls `on_merged` with each source and its first shard that is still needed."""
        num_read = [source.position.num_read for source in merged]
        outcomes = take_turns([source.outcomes(chunks) for source in merged], num_read)
        batches = groups(outcomes, _num_tokens, PART_TOKENS, BATCH)
        while not self.finished:
            kept, problems = list[Tokens](), list[Problem]()
            tokens_before, read_before = self.counts["tokens kept"], self.counts["read"]
            while (
                not self.finished
                and self.counts["tokens kept"] - tokens_before < PART_TOKENS
                and self.counts["read"] - read_before < PART_DOCUMENTS
            ):
                kept += self._take(next(batches, []), problems)
            notes = {
                "positions": [source.position for source in merged],
                "ended": self.ended,
                "counts": dict(self.counts),
                "sources": [source.described() for source in merged],
                "problems": [problem._asdict() for problem in problems],
            }
            write_part_file(self.folder / part_name(self.num_parts), kept, notes)
            self.num_parts += 1
            for source in merged:
                on_merged(source.number, source.position.shard)

    def _take(self, batch: Sequence[Outcome], problems: list[Problem]) -> list[Tokens]:
        """Counts a batch and returns the documents to keep. The sources have ended if it is not full."""
        self.ended = len(batch) < BATCH and sum(map(_num_tokens, batch)) < PART_TOKENS
        good = good_documents(batch, self.data.bad_documents, problems.append, "data.bad_documents=skip")
        kept = [outcome for outcome in good if isinstance(outcome, Tokens)]
        lengths = [len(tokens.input_ids) for tokens in kept]
        self.counts.update(_kind(outcome) for outcome in batch if not isinstance(outcome, Tokens))
        self.counts.update(tokens.remark for tokens in kept if tokens.remark)
        self.counts.update({"read": len(batch), "kept": len(kept), "tokens kept": sum(lengths)})
        self.weight += self.need.weight(lengths)
        return kept


class _Progress:
    """Shows how much of the need all processes have read. Without workers, also prints an estimate of the time."""

    def __init__(self, preparation: _Preparation):
        self.need, self.say_estimate = preparation.need, not preparation.num_workers
        self.before = self.weight = preparation.weight
        self.tokens = preparation.counts["tokens kept"]
        self.num_read, self.start = 0, time.perf_counter()
        self.bar = ProgressBar(
            desc="preparing documents",
            total=None if self.need.amount == ALL else self.need.amount,
            initial=self.weight,
            unit=f" {self.need.unit}",
            unit_scale=True,
        )

    def add(self, num_read: int, lengths: Sequence[int]) -> None:
        """Counts documents that were read; `lengths` are the kept documents' numbers of tokens."""
        self.num_read += num_read
        self.tokens += sum(lengths)
        self.weight += self.need.weight(lengths)
        seconds = time.perf_counter() - self.start
        rate = self.num_read / max(seconds, 1e-9)
        self.bar.set_postfix_str(f"{rate:,.0f} documents/s, {self.tokens:,} tokens kept", refresh=False)
        self.bar.update(min(self.weight, self.need.amount) - self.bar.n)
        if self.weight >= self.need.amount:  # workers can have read later shards before earlier ones
            self.bar.set_description_str("finishing the first shards", refresh=False)
        if self.say_estimate and seconds >= ESTIMATE_AFTER_S and self.weight > self.before:
            self.say_estimate = False
            left = (self.need.amount - self.weight) * seconds / (self.weight - self.before)
            if left > 0:
                needs = (
                    "reads all of the files" if left == ALL else f"needs about {ProgressBar.format_interval(left)} more"
                )
                ProgressBar.write(
                    f"the documents of this recipe are not prepared: at {rate:,.0f} documents/s this process {needs}, "
                    "while the run waits. Several processes are faster: stop this run, start condense prepare with the "
                    "same recipe and overrides, then this run again. data.max_documents=N reads only the first N."
                )


def _summarize(store: Store) -> None:
    """Writes `problems.jsonl` and `summary.json`, and prints the counts of documents, unless they are the same."""
    counts, sources = store.notes["counts"], store.notes.get("sources", [])
    summary = store.folder / "summary.json"
    by_source = {f"{n}: {one['source']}": one["counts"] for n, one in enumerate(sources)} if len(sources) > 1 else {}
    text = json.dumps(counts | ({"sources": by_source} if by_source else {}), indent=2)
    if summary.exists() and summary.read_text() == text:
        return
    problems = [problem for part in store.parts for problem in part.notes["problems"]]
    (store.folder / "problems.jsonl").write_text("".join(json.dumps(item) + "\n" for item in problems))
    summary.write_text(text)  # last: after a kill before this line, the next run writes both files
    others = _in_words({what: counts[what] for what in counts if what not in ("read", "kept", "tokens kept")})
    print(
        f"{store.folder}: {counts['read']:,} documents read, {counts['kept']:,} kept with "
        f"{counts['tokens kept']:,} tokens" + (f"; {others}" if others else ""),
        flush=True,
    )
    for name, found in by_source.items():
        print(f"  {name}: {_in_words(found) or 'none'}", flush=True)
