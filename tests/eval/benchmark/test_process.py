"""Calls run in processes of their own, which end with their parents."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from condense.eval.benchmark.process import ProcessKilledError, call

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]

held: list[bytes] = []


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("the reason")


def describe(size: int) -> tuple[int, int, str, bytes]:
    print("printed")  # to the standard output, which carries the answer
    held.append(b"")
    return os.getpid(), len(held), os.getcwd(), b"x" * size


def test_a_call_has_a_process_of_its_own_in_the_folder_of_the_caller(tmp_path, monkeypatch):
    """So a relative path, such as the folder of snapshots, means the same there."""
    held.append(b"")
    monkeypatch.chdir(tmp_path)
    pid, calls, folder, large = call(describe, 2**22)
    assert pid != os.getpid() and calls == 1 and folder == str(tmp_path) and len(large) == 2**22


def test_a_killed_and_a_failing_call_are_told_apart():
    with pytest.raises(ProcessKilledError, match="killed"):
        call(kill_itself)
    with pytest.raises(RuntimeError, match="(?s)exit code 1.*ValueError: the reason") as failed:
        call(fail)
    assert not isinstance(failed.value, ProcessKilledError)


def test_a_call_ends_with_the_process_that_asked_for_it():
    code = "import time; from condense.eval.benchmark.process import call; call(time.sleep, 60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as asking:
        end = time.monotonic() + 30
        while not (children := psutil.Process(asking.pid).children()) and time.monotonic() < end:
            time.sleep(0.1)
        (child,) = children
        while child.num_threads() == 1 and time.monotonic() < end:  # it begins to watch after its imports
            time.sleep(0.1)
        asking.kill()
    gone, alive = psutil.wait_procs([child], timeout=30)
    assert gone and not alive
