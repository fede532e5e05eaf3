"""One run at a time in an output folder.

The lock is the operating system's, so it ends with its process. Beside it stands who holds it, for whoever is refused.
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def output_lock(folder: Path, name: str = "run") -> Iterator[None]:
    """Holds `folder` for what `name` writes there.

    Raises `ValueError` naming the process that holds it already: which one, on which machine, and since when.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder, name)
    _acquire(lock, folder, name)
    try:
        owner = {
            "process": os.getpid(),
            "host": platform.node(),
            "since": datetime.now().isoformat(" ", "seconds"),
            "command": shlex.join(sys.argv),
        }
        _owner_file(folder, name).write_text(json.dumps(owner), encoding="utf-8")
        yield
    finally:
        _owner_file(folder, name).unlink(missing_ok=True)
        lock.release()


def check_unlocked(folder: Path, name: str = "run") -> None:
    """Raises `ValueError` as `output_lock` would, and takes nothing."""
    if not was_released(folder, name):
        lock = _lock(folder, name)
        _acquire(lock, folder, name)
        lock.release()


def was_released(folder: Path, name: str = "run") -> bool:
    """Whether the last one that held the folder has released it: false while it is held, and after a kill."""
    return not _owner_file(folder, name).exists()


def _lock(folder: Path, name: str) -> FileLock:
    return FileLock(folder / f".{name}.lock", timeout=0)


def _owner_file(folder: Path, name: str) -> Path:
    return folder / f".{name}.lock.json"


def _acquire(lock: FileLock, folder: Path, name: str) -> None:
    try:
        lock.acquire()
    except Timeout:
        try:
            owner = json.loads(_owner_file(folder, name).read_text(encoding="utf-8"))
            who = f"process {owner['process']} on {owner['host']} since {owner['since']} ({owner['command']})"
        except (OSError, ValueError, KeyError):  # it has just begun
            who = "another process"
        raise ValueError(f"{folder} is in use by {who}: wait until it ends, or choose another output.") from None
