"""Processes that end when the process that started them ends, by any signal.

`condense train` starts DeepSpeed's runner, which starts its launcher, which starts the ranks. Neither of the two
forwards every signal, and no process can forward SIGKILL: so the parent ends its children, and each rank watches its
parents.
"""

import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import psutil

import condense

PARENT = "CONDENSE_PARENT"  # the process that a process started by `run_to_end` ends with
GRACE_S = 30  # between SIGTERM and SIGKILL
INTERVAL_S = 1.0


def child_environment() -> dict[str, str]:
    """The environment of Python processes started here, which import this package, installed or not."""
    root = str(Path(condense.__file__).parents[1])
    if root in site.getsitepackages():
        return dict(os.environ)
    given = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{given}" if given else root}


def run_to_end(command: Sequence[str], environment: Mapping[str, str], **options) -> int:
    """Runs a command and returns its exit code. SIGTERM, SIGHUP and exceptions here end it and all its children."""
    with _signals_as_exit():
        process = subprocess.Popen(command, env={**environment, PARENT: str(os.getpid())}, **options)
        try:
            return process.wait()
        finally:
            if process.returncode is None:
                _end_tree(psutil.Process(process.pid))


def end_with_parents() -> None:
    """Ends this process and its children within seconds after any of its watched parents ends.

    Watched are the process that called `run_to_end` and all processes between, or else DeepSpeed's launcher and runner.
    """
    parents = _parents()
    if not parents:
        return

    def watch() -> None:
        while all(map(_is_alive, parents)):
            time.sleep(INTERVAL_S)
        gone = next(parent.pid for parent in parents if not _is_alive(parent))
        with suppress(OSError):  # the terminal may be closed as well
            print(f"process {os.getpid()} ends: its parent, process {gone}, has gone", file=sys.stderr, flush=True)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end_with_parents").start()


def _parents() -> list[psutil.Process]:
    chain, started_by = psutil.Process().parents(), os.environ.get(PARENT)
    if started_by is not None:
        numbers = [parent.pid for parent in chain]
        if int(started_by) not in numbers:
            sys.exit(f"process {os.getpid()} ends: its parent, process {started_by}, has gone")
        return chain[: numbers.index(int(started_by)) + 1]
    return list(takewhile(_is_deepspeed, chain))


def _is_deepspeed(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("deepspeed" in part for part in process.cmdline()[:3])
    return False


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _end_tree(root: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, timeout=GRACE_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, as Ctrl-C does. Signals are the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    # Ignored signals stay ignored, such as SIGHUP under nohup.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
