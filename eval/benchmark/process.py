"""Calls functions in separate processes, forked from one that has imported the libraries.

So memory left or kernels warmed up by an earlier call do not affect a measurement, and imports run only once. The
server only imports: it has one thread and no CUDA context.

A forked process inherits the server's memory but not its mapping of file pages (the libraries' code). Linux maps them
again at the first access. `_map_pages` does so at once, so the resident memory before a measurement is that of a
process that has imported the libraries itself.
"""

import ctypes
import importlib
import mmap
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from condense.training.subprocesses import PARENT, child_environment, end_with_parents

PAGE_BYTES = mmap.PAGESIZE
PRESENT, FILE_PAGE = 1 << 63, 1 << 61  # in an entry of /proc/PID/pagemap


class ProcessKilledError(RuntimeError):
    """Raised if the system has killed a call's process, its last resort when memory runs out."""


class ForkServer:
    """Calls a function of a module in forked processes, one call at a time. The first call starts the server."""

    def __init__(self, function: Callable[..., Any]):
        self._function = f"{function.__module__}:{function.__name__}"
        self._server: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the server

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the server. A call that still runs after an exception ends with its parent."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        self._errors.close()

    def call(self, *arguments: Any) -> Any:
        """Returns the function's result. Raises `ProcessKilledError` for SIGKILL, `RuntimeError` for other failures."""
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        start = self._errors.seek(0, os.SEEK_END)
        try:
            pickle.dump(arguments, server.stdin)
            server.stdin.flush()
            exit_code, result = pickle.load(server.stdout)
        except (EOFError, BrokenPipeError):  # the server itself has ended: the next call starts a new one
            self._server, result = None, None
            server.communicate()
            exit_code = server.returncode
        if exit_code == -9:
            raise ProcessKilledError(f"{arguments}: the system has killed the process.")
        if exit_code:
            self._errors.seek(start)
            said = self._errors.read().decode(errors="replace")
            raise RuntimeError(f"{arguments} failed with exit code {exit_code}:\n{said}")
        return result

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", __name__, self._function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={PARENT: str(os.getpid()), **child_environment()},  # `end_with_parents` reads it
        )


def serve(name: str) -> None:
    """Runs the server: reads arguments from standard input, writes exit code and result to standard output."""
    import torch

    module, function_name = name.split(":")
    function = getattr(importlib.import_module(module), function_name)
    assert threading.active_count() == 1
    assert not torch.cuda.is_initialized()
    pages = _file_pages()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a measurement may print
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_in_a_fork(function, arguments, pages), answers)
        answers.flush()


def _in_a_fork(function: Callable[..., Any], arguments: Sequence[Any], pages: Sequence[int]) -> tuple[int, Any]:
    """Returns exit code and result."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(function, arguments, pages, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:  # it ended without a result
        result = None
    process.join()
    assert process.exitcode is not None
    return process.exitcode, result


def _run(function: Callable[..., Any], arguments: Sequence[Any], pages: Sequence[int], sender: Connection) -> None:
    end_with_parents()
    _map_pages(pages)
    sender.send(function(*arguments))


def _file_pages() -> Sequence[int]:
    """Returns the addresses of the file pages that this process has mapped; empty on systems without /proc."""
    pages = array("Q")
    if not Path("/proc/self/pagemap").exists():
        return pages
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, inode = line.split()[:5]
            if inode == "0":
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            pagemap.seek(begin // PAGE_BYTES * 8)
            entries = array("Q", pagemap.read((end - begin) // PAGE_BYTES * 8))
            mapped = (number for number, entry in enumerate(entries) if entry & PRESENT and entry & FILE_PAGE)
            pages.extend(begin + number * PAGE_BYTES for number in mapped)
    return pages


def _map_pages(pages: Sequence[int]) -> None:
    for address in pages:
        ctypes.string_at(address, 1)  # reading a byte maps the page


if __name__ == "__main__":
    serve(sys.argv[1])
