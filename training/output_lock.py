"""Allows one run at a time in an output folder.

The lock is the operating system's (flock), so it ends with its process. The lock file names the holder, which the error
of a second process shows. It is empty once released.
"""

import fcntl
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from condense.utils.files import check_not_linked

PATIENCE_S = 2.0  # another process's check holds the lock for a moment


@contextmanager
def output_lock(folder: Path, name: str = "run") -> Iterator[None]:
    """Locks `folder` for the files of `name`. If the file system has no locks, prints a warning instead.

    Raises `ValueError` with the holding process, its machine and the start time if the lock is taken, and if the lock
    file is a link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = lock_file(folder, name)
    check_not_linked(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        _acquire(descriptor, path, PATIENCE_S)
        owner = {
            "process": os.getpid(),
            "host": platform.node(),
            "since": datetime.now().isoformat(" ", "seconds"),
            "command": shlex.join(sys.argv),
        }
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        yield
        os.truncate(descriptor, 0)
    finally:
        os.close(descriptor)  # releases the lock


def check_unlocked(folder: Path, name: str = "run") -> None:
    """Raises `ValueError` as `output_lock` would, without locking."""
    path = lock_file(folder, name)
    if path.exists():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _acquire(descriptor, path, 0.0)
        finally:
            os.close(descriptor)


def was_finished(folder: Path) -> bool:
    """Returns whether the folder's last run has finished: not while it runs, nor after an error or a kill."""
    path = lock_file(folder)
    return path.exists() and path.stat().st_size == 0


def lock_file(folder: Path, name: str = "run") -> Path:
    return folder / f".{name}.lock"


def _acquire(descriptor: int, path: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise ValueError(
                f"{path.parent} is in use by {_owner(path)}: wait until it ends, or choose another output."
            ) from None
        except OSError as error:
            print(f"WARNING: {path} can't be locked ({error.strerror}): start nothing else in this output.", flush=True)
            return None


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']} since {owner['since']} ({owner['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # not written yet
        return "another process"
