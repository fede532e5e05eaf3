"""Prepares documents: reads and tokenises them once, into a folder that training then reads by number.

Each part records the position after it, so a preparation that was killed resumes, and ends with the same documents.
One process prepares, and others wait for it. With worker processes the result is the same to the byte: see `workers`.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from condense.progress import ProgressBar

from ..recipe import DocumentData, Source
from .chunks import Chunk, Outcome, Reading, read_chunks
from .documents import good_documents, take_turns
from .former import UNMERGED, check_line_ends
from .shards import Problem, open_shards
from .store import Encode, Need, Store, Tokens, part_name, room_for, write_part_file
from .workers import Needed, Workers

BATCH = 64  # documents between two checks of whether more are needed
PART_TOKENS = 2**24  # of a part, approximately
PART_DOCUMENTS = 2**16  # read for a part, at most: it limits what a kill loses where most documents are dropped
JUDGED_AFTER = 16  # documents of a source that are read; a source without any kept one is then refused
ESTIMATE_AFTER_S = 10.0  # a run that prepares for longer prints an estimate of the time


def prepare(
    folder: Path,
    data: DocumentData,
    sources: Sequence[Source],
    make_encode: Callable[[], Encode],
    need: Need,
    with_summaries: bool,
    num_workers: int = 0,
) -> Store:
    """Reads and tokenises documents until enough are kept, or the sources end.

    `num_workers` processes read different shards; 0 reads in this one. `make_encode` can be sent to a process. Raises
    `ValueError` for the first document with a problem if `bad_documents` is "refuse", where no document is left, and
    for a folder that a former version prepared in another way.
    """
    with room_for(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with room_for(folder), FileLock(folder / ".lock"):
        check_line_ends(folder, sources)
        store = Store(folder)
        preparation = _Preparation(store, data, need, num_workers)
        if not preparation.finished:
            preparation.run(sources, make_encode, with_summaries)
            store = Store(folder)
        shutil.rmtree(folder / UNMERGED, ignore_errors=True)
        _summarize(store)
    if not len(store):
        raise ValueError(f"no document is left to train on: {store.notes['counts']}; see {folder / 'summary.json'}.")
    _check_sources(store)
    return store


def _check_sources(store: Store) -> None:
    """Raises `ValueError` for a source without a document among those that are kept, once enough of it was read."""
    for number, described in enumerate(store.notes.get("sources", [])):
        counts = described["counts"]
        read = sum(counts.values())
        if number not in store.sources and (described["ended"] or read >= JUDGED_AFTER):
            why = ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "it is empty"
            raise ValueError(
                f"source {described['source']} gives no document: of {read:,} read none is kept ({why}); see "
                f"{store.folder / 'problems.jsonl'}. Correct the source or its fields, or leave it out."
            )


class Position(NamedTuple):
    """A position in a source: a shard, its chunk, and the numbers of records read of this chunk and of the source."""

    shard: int = 0
    chunk: int = 0
    before: Any = None  # the chunk's position in the shard
    taken: int = 0
    num_read: int = 0


class _Merged:
    """The outcomes of one source's records, shard after shard."""

    def __init__(self, source: Source, number: int, position: Position, counts: dict[str, Any]):
        self.source, self.number, self.position = source, number, position
        self.shards = open_shards(source)
        self.counts, self.ended = Counter(counts.get("counts", {})), counts.get("ended", False)

    def readings(self) -> list[Reading]:
        """The shards that are not completely read; the first one begins at the chunk of the position."""
        first, *others = range(self.position.shard, len(self.shards))
        starts = [(first, self.position.chunk, self.position.before), *((other, 0, None) for other in others)]
        return [
            Reading(self.source, self.number, self.shards[shard], shard, chunk, before)
            for shard, chunk, before in starts
        ]

    def outcomes(self, chunks: Callable[[Reading], Iterator[Chunk]]) -> Iterator[Outcome]:
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
        """Counts of a source: the number of documents by what became of them, and whether it has ended."""
        source = self.source
        name = source.files or ":".join(part for part in (source.hub, source.name, source.split) if part)
        return {"source": name, "counts": dict(self.counts), "ended": self.ended}


def _kind(outcome: Outcome) -> str:
    return "kept" if isinstance(outcome, Tokens) else outcome if isinstance(outcome, str) else outcome.kind


class _Preparation:
    """The progress of a preparation."""

    def __init__(self, store: Store, data: DocumentData, need: Need, num_workers: int):
        self.folder, self.data, self.need, self.num_workers = store.folder, data, need, num_workers
        self.num_parts, self.num_kept = len(store.parts), len(store)
        self.weight = int(need.weigh(store.lengths).sum())
        self.notes = store.notes
        self.positions = self.notes["positions"]
        self.ended, self.counts = self.notes["ended"], Counter(self.notes["counts"])

    @property
    def finished(self) -> bool:
        full = self.data.max_documents is not None and self.num_kept >= self.data.max_documents
        return self.ended or full or self.weight >= self.need.amount

    def run(self, sources: Sequence[Source], make_encode: Callable[[], Encode], with_summaries: bool) -> None:
        positions = [Position(*position) for position in self.positions or [()] * len(sources)]
        described = self.notes.get("sources") or [{}] * len(sources)  # folders of earlier versions have none
        merged = list(map(_Merged, sources, range(len(sources)), positions, described))
        with closing(_Progress(self)) as progress:
            if self.num_workers:
                unmerged = self.folder / UNMERGED
                unmerged.mkdir(exist_ok=True)
                # In the order in which they are needed: the sources take turns.
                readings = sorted(
                    (reading for source in merged for reading in source.readings()),
                    key=lambda reading: (reading.shard_number, reading.source_number),
                )
                needed = Needed(self.need, self.data.max_documents, BATCH, [len(source.shards) for source in merged])
                with Workers(
                    unmerged, readings, make_encode, with_summaries, self.num_workers, needed, progress.add
                ) as workers:
                    self._merge(merged, workers.chunks, workers.merged)
                return
            encode = make_encode()

            def chunks(reading: Reading) -> Iterator[Chunk]:
                for chunk in read_chunks(reading, with_summaries, encode):
                    progress.add(len(chunk.outcomes), [len(tokens.input_ids) for tokens in chunk.kept])
                    yield chunk

            self._merge(merged, chunks, lambda source, shard: None)

    def _merge(
        self,
        merged: Sequence[_Merged],
        chunks: Callable[[Reading], Iterator[Chunk]],
        on_merged: Callable[[int, int], object],
    ) -> None:
        """Writes parts; `on_merged` is called with a source and the first of its shards that is still needed."""
        option = "data.bad_documents=skip"
        num_read = [source.position.num_read for source in merged]
        outcomes = take_turns([source.outcomes(chunks) for source in merged], num_read)
        while not self.finished:
            kept: list[Tokens] = []
            problems: list[Problem] = []
            num_tokens, last = 0, self.counts["read"] + PART_DOCUMENTS
            while not self.finished and num_tokens < PART_TOKENS and self.counts["read"] < last:
                batch = list(islice(outcomes, BATCH))
                self.ended = len(batch) < BATCH
                skipped: list[Problem] = []
                encoded: list[Tokens | str] = list(
                    good_documents(batch, self.data.bad_documents, skipped.append, option)
                )
                new = self._count(encoded, skipped)
                problems += skipped
                kept += new
                num_tokens += sum(len(tokens.input_ids) for tokens in new)
            notes = {
                "positions": [source.position for source in merged],
                "ended": self.ended,
                "counts": dict(self.counts),
                "sources": [source.described() for source in merged],
                "problems": [problem.__dict__ for problem in problems],
            }
            write_part_file(self.folder / part_name(self.num_parts), kept, notes)
            self.num_parts += 1
            for source in merged:
                on_merged(source.number, source.position.shard)

    def _count(self, encoded: Sequence[Tokens | str], skipped: Sequence[Problem]) -> list[Tokens]:
        kept = [item for item in encoded if not isinstance(item, str)]
        lengths = np.array([len(tokens.input_ids) for tokens in kept], dtype=int)
        self.counts.update(item for item in encoded if isinstance(item, str))
        self.counts.update(tokens.remark for tokens in kept if tokens.remark)
        self.counts.update(problem.kind for problem in skipped)
        num_read = len(encoded) + len(skipped)
        self.counts.update({"read": num_read, "kept": len(kept), "tokens kept": int(lengths.sum())})
        self.num_kept += len(kept)
        self.weight += int(self.need.weigh(lengths).sum())
        return kept


class _Progress:
    """Shows what all processes have read of what is needed; without workers, also prints an estimate of the time."""

    def __init__(self, preparation: _Preparation):
        self.need, self.say_estimate = preparation.need, not preparation.num_workers
        self.before = self.weight = preparation.weight
        self.tokens = preparation.counts["tokens kept"]
        self.num_read, self.start = 0, time.perf_counter()
        self.bar = ProgressBar(
            desc="preparing documents",
            total=self.need.amount,
            initial=self.weight,
            unit=f" {self.need.unit}",
            unit_scale=True,
        )

    def close(self) -> None:
        self.bar.close()

    def add(self, num_read: int, lengths: Sequence[int]) -> None:
        """Counts documents that were read, and those of them that are kept by their numbers of tokens."""
        self.num_read += num_read
        self.tokens += sum(lengths)
        self.weight += int(self.need.weigh(np.array(lengths, dtype=int)).sum())
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
                ProgressBar.write(
                    f"the documents of this recipe are not prepared: at {rate:,.0f} documents/s this process needs "
                    f"about {ProgressBar.format_interval(left)} more, while the run waits. Several processes are "
                    "faster: stop this run, start condense prepare with the same recipe and overrides, then this run "
                    "again."
                )


def _summarize(store: Store) -> None:
    """Writes `problems.jsonl` and `summary.json`, and prints the counts of documents, where they have changed."""
    counts, sources = store.notes["counts"], store.notes.get("sources", [])
    summary = store.folder / "summary.json"
    by_source = (
        {"sources": {f"{n}: {one['source']}": one["counts"] for n, one in enumerate(sources)}}
        if len(sources) > 1
        else {}
    )
    text = json.dumps(counts | by_source, indent=2)
    if summary.exists() and summary.read_text() == text:
        return
    problems = [problem for part in store.parts for problem in part.notes["problems"]]
    (store.folder / "problems.jsonl").write_text("".join(json.dumps(item) + "\n" for item in problems))
    summary.write_text(text)  # last: after a kill before this line, the next run writes both files
    others = ", ".join(
        f"{count:,} {what}" for what, count in counts.items() if what not in ("read", "kept", "tokens kept")
    )
    print(
        f"{store.folder}: {counts['read']:,} documents read, {counts['kept']:,} kept with "
        f"{counts['tokens kept']:,} tokens" + (f"; {others}" if others else ""),
        flush=True,
    )
    for name, found in by_source.get("sources", {}).items():
        print(f"  {name}: " + (", ".join(f"{count:,} {what}" for what, count in found.items()) or "none"), flush=True)
