"""Processes that tokenise the shards of sources, and what they have written, in the order of the shards.

Each worker reads a whole shard and appends its chunks to a file. The process that merges them reads these files, so
the order of the documents does not depend on the number of workers, and chunks outlive a preparation that is killed.
"""

import multiprocessing
import os
import signal
import struct
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from condense.progress import ProgressBar

from .chunks import Chunk, Reading, read_chunks
from .store import Encode, Need, room_for

# What each worker imports: a server imports it once, and forks them. This process can't be forked: its threads may
# hold locks.
PRELOAD = [__name__]
SIZE = struct.Struct("<Q")  # before each chunk, its number of bytes
STOP = "stop"  # in the place of a reading: the rest of the shard is not needed


def chunk_file(folder: Path, source: int, shard: int) -> Path:
    return folder / f"{source}-{shard:05d}.chunks"


def read_chunk(file: BinaryIO) -> Chunk | None:
    """The next chunk; None at the end of the file, and where a kill has left half a chunk."""
    header = file.read(SIZE.size)
    if len(header) < SIZE.size:
        return None
    (size,) = SIZE.unpack(header)
    data = file.read(size)
    return Chunk.from_bytes(data) if size and len(data) == size else None


class Needed:
    """Counts what shards hold. A shard is needed until the shards of its source up to it hold enough.

    The rest of the shard is then never merged: earlier shards and other sources that are still read only add documents
    before it. Documents are merged in batches, so `num_more` records after those that are enough are needed too.
    """

    def __init__(self, need: Need, max_documents: int | None, num_more: int, num_shards: Sequence[int]):
        self.need, self.num_more = need, num_more
        self.enough = np.array([need.amount, np.inf if max_documents is None else max_documents])
        self.held = [np.zeros((number, 2), int) for number in num_shards]  # of each shard: weight, kept documents
        self.more = [np.zeros(number, int) for number in num_shards]  # of each shard: records after what is enough

    def add(self, source: int, shard: int, num_read: int, lengths: Sequence[int]) -> None:
        """Counts a chunk of `num_read` records; `lengths` are the numbers of tokens of the documents that are kept."""
        if self._is_enough(source, shard):
            self.more[source][shard] += num_read
        self.held[source][shard] += int(self.need.weigh(np.array(lengths, dtype=int)).sum()), len(lengths)

    def __contains__(self, key: tuple[int, int]) -> bool:
        source, shard = key
        return not self._is_enough(source, shard) or self.more[source][: shard + 1].sum() < self.num_more

    def _is_enough(self, source: int, shard: int) -> bool:
        return bool((self.held[source][: shard + 1].sum(0) >= self.enough).any())


class Workers:
    """Worker processes for a list of shards; leaving the context ends them.

    They read the shards that are `needed`, each until it is not needed any more. `on_chunk` is called with the number
    of documents of each chunk, and the lengths of those that are kept.
    """

    def __init__(
        self,
        folder: Path,
        readings: Sequence[Reading],
        make_encode: Callable[[], Encode],
        with_summaries: bool,
        count: int,
        needed: Needed,
        on_chunk: Callable[[int, Sequence[int]], object],
    ):
        self.folder, self.needed, self.on_chunk, self.waiting = folder, needed, on_chunk, deque(readings)
        self.written = {(reading.source_number, reading.shard_number): 0 for reading in readings}  # chunks
        self.done: set[tuple[int, int]] = set()
        self.stopped: set[tuple[int, int]] = set()  # before their ends
        self.errors: dict[tuple[int, int], Exception] = {}  # raised where the chunks before them are merged
        if count > len(readings):
            print(f"{len(readings)} of {count} workers start: each reads a shard, and there are no more", flush=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.processes: dict[Connection, Any] = {}
        self.at: dict[Connection, str] = {}  # the documents that each worker reads
        self.reads: dict[Connection, tuple[int, int]] = {}
        for _ in range(min(count, len(readings))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, folder, make_encode, with_summaries), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.processes[ours] = process
            self._assign(ours)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join()

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """The chunks of a shard from its first one on, as soon as they are written; then the shard's error, if any."""
        key, num_read = (reading.source_number, reading.shard_number), 0
        while not self.written[key] and key not in self.done:
            self._receive()
        if self.written[key]:
            with chunk_file(self.folder, *key).open("rb") as file:
                while num_read < self.written[key] or key not in self.done:
                    if num_read == self.written[key]:
                        self._receive()
                        continue
                    chunk = read_chunk(file)
                    assert chunk is not None
                    num_read += 1
                    if chunk.number >= reading.first:
                        yield chunk
                    self._receive(timeout=0)
        if key in self.errors:
            raise self.errors[key]
        assert key not in self.stopped

    def merged(self, source: int, first: int) -> None:
        """Deletes what the shards before number `first` of a source have written."""
        for written_source, shard in self.done:
            if written_source == source and shard < first:
                chunk_file(self.folder, source, shard).unlink(missing_ok=True)

    def _assign(self, connection: Connection) -> None:
        while self.waiting and not self._is_needed(self.waiting[0].source_number, self.waiting[0].shard_number):
            self.waiting.popleft()
        reading = self.waiting.popleft() if self.waiting else None
        if reading is not None:
            self.at[connection] = f"the beginning of {reading.shard}"
            self.reads[connection] = (reading.source_number, reading.shard_number)
        else:
            del self.reads[connection]
        with suppress(ConnectionError):  # a worker that has died is noticed when its message is awaited
            connection.send(reading)

    def _is_needed(self, source: int, shard: int) -> bool:
        """Not where the shards before it hold enough, or one of them ends the preparation with its error."""
        failed = any(number == source and first < shard for number, first in self.errors)
        return not failed and (source, shard) in self.needed

    def _stop(self) -> None:
        """Tells workers to leave shards that are not needed any more."""
        for connection, key in self.reads.items():
            if key not in self.stopped and not self._is_needed(*key):
                self.stopped.add(key)
                with suppress(ConnectionError):
                    connection.send(STOP)

    def _receive(self, timeout: float | None = None) -> None:
        """Takes a message of each worker that has sent one."""
        assert self.reads or timeout == 0
        for connection in wait(list(self.reads), timeout):
            assert isinstance(connection, Connection)
            try:
                kind, *values = connection.recv()
            except (EOFError, ConnectionError):
                process = self.processes[connection]
                process.join()
                raise ChildProcessError(
                    f"{self.at[connection]}: the worker process that read these documents ended with exit code "
                    f"{process.exitcode} (-9 is a kill, often for lack of memory). Start condense prepare again, with "
                    "fewer --workers: it resumes where it was stopped."
                ) from None
            key = self.reads[connection]
            if kind == "reads":
                (self.at[connection],) = values
            elif kind == "written":
                self.written[key] += 1
                self.needed.add(*key, *values)
                self.on_chunk(*values)
                self._stop()
            else:
                if kind == "error":
                    for_user, message = values
                    self.errors[key] = (ValueError if for_user else RuntimeError)(message)
                    last_line = message.strip().splitlines()[-1]
                    ProgressBar.write(
                        f"{last_line}\nThis error ends the preparation, unless the documents before are enough."
                    )
                    self._stop()
                self.done.add(key)
                self._assign(connection)


def _work(connection: Connection, folder: Path, make_encode: Callable[[], Encode], with_summaries: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends its workers
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is a core
    encode = None
    while (reading := connection.recv()) is not None:
        if reading == STOP:
            continue  # it came after the end of the shard
        try:
            encode = encode or make_encode()
            path = chunk_file(folder, reading.source_number, reading.shard_number)
            with room_for(folder.parent), path.open("a+b") as file:
                _append_chunks(file, reading, with_summaries, encode, connection)
        except Exception as error:
            for_user = isinstance(error, ValueError | OSError)
            connection.send(("error", for_user, str(error) if for_user else traceback.format_exc()))
        else:
            connection.send(("done",))


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _append_chunks(
    file: BinaryIO, reading: Reading, with_summaries: bool, encode: Encode, connection: Connection
) -> None:
    """Continues the file of a shard until a message comes, or its end.

    Begins the file anew where it does not hold the chunks that are needed.
    """
    file.seek(0)
    found, end, first, position = [], 0, reading.first, reading.position
    while (chunk := read_chunk(file)) is not None:
        found.append((chunk.number, _counts(chunk) if chunk.number >= reading.first else (0, [])))
        first, position, end = chunk.number + 1, chunk.after, file.tell()
    if found and not found[0][0] <= reading.first <= first:
        found, end, first, position = [], 0, reading.first, reading.position
    file.truncate(end)
    for _, counts in found:
        connection.send(("written", *counts))
    rest = reading._replace(first=first, position=position)
    for chunk in read_chunks(rest, with_summaries, encode, lambda where: connection.send(("reads", where))):
        data = chunk.to_bytes()
        file.write(SIZE.pack(data.size))
        file.write(data)
        file.flush()
        connection.send(("written", *_counts(chunk)))
        if connection.poll():
            stop = connection.recv()
            assert stop == STOP
            return


def _counts(chunk: Chunk) -> tuple[int, list[int]]:
    """The number of documents, and the lengths of those that are kept."""
    return len(chunk.outcomes), [len(tokens.input_ids) for tokens in chunk.kept]
