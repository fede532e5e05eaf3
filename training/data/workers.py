"""Processes that tokenise the shards of sources, and the chunks that they write, in the order of the shards.

Each worker reads a whole shard and appends its chunks to a file. The process that merges them reads these files, so
the order of the documents does not depend on the number of workers, and chunks outlive a preparation that is killed.
"""

import multiprocessing
import os
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from condense.utils.progress import ProgressBar

from .chunks import DocumentChunk, Reading, read_chunks
from .store import Encode, Need, room_for

# A server imports these modules once and forks the workers. This process can't be forked: its threads may hold locks.
PRELOAD = [__name__]
SIZE = struct.Struct("<Q")  # before each chunk, its number of bytes
STOP = "stop"  # sent instead of a reading: the rest of the shard is not needed


def chunk_file(folder: Path, source: int, shard: int) -> Path:
    return folder / f"{source}-{shard:05d}.chunks"


def read_chunk(file: BinaryIO) -> DocumentChunk | None:
    """Returns the next chunk; None at the end of the file, or if a kill has left half a chunk."""
    header = file.read(SIZE.size)
    if len(header) < SIZE.size:
        return None
    (size,) = SIZE.unpack(header)
    data = file.read(size)
    return DocumentChunk.from_bytes(data) if size and len(data) == size else None


class Needed:
    """Counts what shards hold. A shard is needed until it and the shards of its source before it hold enough.

    The rest of it is then never merged: earlier shards and other sources only add documents before it. Documents are
    merged in batches, so `num_more` records after enough documents are needed too.
    """

    def __init__(self, need: Need, max_documents: int | None, num_more: int, num_shards: Sequence[int]):
        self.need, self.num_more = need, num_more
        self.most = np.inf if max_documents is None else max_documents
        self.held = [np.zeros((number, 2), int) for number in num_shards]  # of each shard: weight, kept documents
        self.more = [np.zeros(number, int) for number in num_shards]  # of each shard: records after enough documents

    def add(self, source: int, shard: int, num_read: int, lengths: Sequence[int]) -> None:
        """Counts a chunk of `num_read` records; `lengths` are the kept documents' numbers of tokens."""
        if self._is_enough(source, shard):
            self.more[source][shard] += num_read
        self.held[source][shard] += self.need.weight(lengths), len(lengths)

    def __contains__(self, key: tuple[int, int]) -> bool:
        source, shard = key
        return not self._is_enough(source, shard) or self.more[source][: shard + 1].sum() < self.num_more

    def _is_enough(self, source: int, shard: int) -> bool:
        weight, documents = self.held[source][: shard + 1].sum(0)
        return documents >= self.most or (weight >= self.need.amount and documents >= self.need.documents)


class Workers:
    """Worker processes for a list of shards; leaving the context ends them.

    They read each shard as long as it is `needed`. Calls `on_chunk` with the counts of each chunk.
    """

    def __init__(
        self,
        folder: Path,
        readings: Sequence[Reading],
        make_encode: Callable[[], Encode],
        count: int,
        needed: Needed,
        on_chunk: Callable[[int, Sequence[int]], object],
    ):
        self.folder, self.needed, self.on_chunk, self.waiting = folder, needed, on_chunk, iter(readings)
        self.written = {reading.key: 0 for reading in readings}  # chunks
        self.done: set[tuple[int, int]] = set()
        self.stopped: set[tuple[int, int]] = set()  # before their ends
        self.errors: dict[tuple[int, int], Exception] = {}  # raised when the chunks before them are merged
        if count > len(readings):
            print(f"{len(readings)} of {count} workers start: each reads a shard, and there are no more", flush=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.processes: dict[Connection, Any] = {}
        self.at: dict[Connection, str] = {}  # the documents that each worker reads
        self.reads: dict[Connection, tuple[int, int]] = {}
        for _ in range(min(count, len(readings))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, folder, make_encode), daemon=True)
            process.start()
            theirs.close()  # so the end of the process is the end of the pipe
            self.processes[ours] = process
            self._assign(ours)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join()

    def chunks(self, reading: Reading) -> Iterator[DocumentChunk]:
        """Yields the chunks of a shard, as soon as they are written; then raises the shard's error, if any."""
        key, num_read = reading.key, 0
        with chunk_file(self.folder, *key).open("a+b") as file:  # the worker may not have made it yet
            file.seek(0)
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
        """Deletes the chunks of a source's shards before number `first`."""
        for written_source, shard in self.done:
            if written_source == source and shard < first:
                chunk_file(self.folder, source, shard).unlink(missing_ok=True)

    def _assign(self, connection: Connection) -> None:
        reading = next((reading for reading in self.waiting if self._is_needed(*reading.key)), None)
        if reading is not None:
            self.at[connection] = f"the beginning of {reading.shard}"
            self.reads[connection] = reading.key
        else:
            del self.reads[connection]
        with suppress(ConnectionError):  # a worker that has died is noticed when its message is awaited
            connection.send(reading)

    def _is_needed(self, source: int, shard: int) -> bool:
        """Returns False if the shards before it hold enough, or one of them ends the preparation with its error."""
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
        """Handles a message from each worker that has sent one."""
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


def _work(connection: Connection, folder: Path, make_encode: Callable[[], Encode]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent ends its workers
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
            with room_for(folder.parent), chunk_file(folder, *reading.key).open("a+b") as file:
                _append_chunks(file, reading, encode, connection)
        except Exception as error:
            for_user = isinstance(error, ValueError | OSError)
            connection.send(("error", for_user, str(error) if for_user else traceback.format_exc()))
        else:
            connection.send(("done",))


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _append_chunks(file: BinaryIO, reading: Reading, encode: Encode, connection: Connection) -> None:
    """Continues the file of a shard until a message comes, or the shard ends.

    Begins the file anew if it does not hold the chunks that are needed.
    """
    file.seek(0)
    found, end, rest = [], 0, reading
    while (chunk := read_chunk(file)) is not None:
        found.append((chunk.number, chunk.counts if chunk.number >= reading.first else (0, [])))
        rest, end = reading._replace(first=chunk.number + 1, position=chunk.after), file.tell()
    if found and not found[0][0] <= reading.first <= rest.first:
        found, end, rest = [], 0, reading
    file.truncate(end)
    for _, counts in found:
        connection.send(("written", *counts))
    for chunk in read_chunks(rest, encode, lambda where: connection.send(("reads", where))):
        data = chunk.to_bytes()
        file.write(SIZE.pack(data.size))
        file.write(data)
        file.flush()
        connection.send(("written", *chunk.counts))
        if connection.poll():
            stop = connection.recv()
            assert stop == STOP
            return
