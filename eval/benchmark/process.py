"""Calls a function in a process of its own, where no earlier call has left memory or warmed up kernels."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from condense.training.subprocesses import PARENT, child_environment, end_with_parents


class ProcessKilledError(RuntimeError):
    """Raised if the system has killed a call's process, its last resort when memory runs out."""


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a module's function. Raises `ProcessKilledError` for SIGKILL, `RuntimeError` for other
    failures. The process ends with this one."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((function, arguments)),
        capture_output=True,
        env={**child_environment(), PARENT: str(os.getpid())},  # `end_with_parents` reads it
    )
    if done.returncode == -9:
        raise ProcessKilledError(f"{arguments}: the system has killed the process.")
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        raise RuntimeError(f"{arguments} failed with exit code {done.returncode}:\n{said}")
    return pickle.loads(done.stdout)


def _answer() -> None:
    """Reads a function and its arguments from standard input, and writes the result to standard output."""
    end_with_parents()
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a measurement may print
    function, arguments = pickle.load(sys.stdin.buffer)
    with answer:
        pickle.dump(function(*arguments), answer)


if __name__ == "__main__":
    _answer()
