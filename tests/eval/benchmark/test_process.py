"""Calls run in forked processes of their own, which end with their parents."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from condense.eval.benchmark.process import ForkServer, ProcessKilledError

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]

held: list[bytes] = []


def behave(kind: str) -> object:
    """Does one of several things, because a server has one function."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "failing":
        raise ValueError("the reason")
    if kind == "large":
        return b"x" * 2**22
    if kind == "sleeping":
        time.sleep(60)
    if kind == "folder":
        return os.getcwd()
    if kind == "memory":
        return resident()
    print("printed")  # to the standard output of the server, which carries the answers
    held.append(b"")
    return {"pid": os.getpid(), "parent": os.getppid(), "calls": len(held), "threads": psutil.Process().num_threads()}


def resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))}


@pytest.fixture(scope="module")
def server():
    with ForkServer(behave) as server:
        yield server


def test_every_call_has_a_process_of_its_own(server):
    first, second = server.call("ordinary"), server.call("ordinary")
    assert len({os.getpid(), first["parent"], first["pid"], second["pid"]}) == 4
    assert first["parent"] == second["parent"]
    assert first["calls"] == second["calls"] == 1  # nothing remains of an earlier call
    assert psutil.Process(first["parent"]).num_threads() == 1
    assert len(server.call("large")) == 2**22


def test_a_killed_and_a_failing_call_are_told_apart(server):
    with pytest.raises(ProcessKilledError, match="killed"):
        server.call("killed")
    with pytest.raises(RuntimeError, match="(?s)exit code 1.*ValueError: the reason") as failed:
        server.call("failing")
    assert not isinstance(failed.value, ProcessKilledError)
    with pytest.raises(RuntimeError) as again:
        server.call("failing")
    assert str(again.value).count("Traceback") == 1  # only of this call
    assert server.call("ordinary")["calls"] == 1


@pytest.fixture(scope="module")
def replaced(server, tmp_path_factory):
    """Returns a server's processes before and after it is killed, and the folder that the caller is in by then."""
    folder, before = tmp_path_factory.mktemp("elsewhere"), server.call("ordinary")["parent"]
    os.kill(before, signal.SIGKILL)
    with pytest.raises(ProcessKilledError):
        server.call("ordinary")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        return before, server.call("ordinary")["parent"], folder


def test_a_server_that_is_killed_is_replaced(replaced):
    before, after, _ = replaced
    assert before != after


def test_calls_run_in_the_folder_of_the_caller(server, replaced):
    """So a relative path, such as the folder of snapshots, means the same there."""
    *_, folder = replaced
    assert server.call("folder") == str(folder)


@pytest.fixture(scope="module")
def asking():
    """Starts a process that prints its memory, then the process of its own server, and waits for a call of it."""
    code = """if True:
        import torch
        from tests.eval.benchmark.test_process import ForkServer, behave, resident
        print(resident())
        with ForkServer(behave) as server:
            print(server.call("ordinary")["parent"], flush=True)
            server.call("sleeping")
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process, eval(process.stdout.readline()), int(process.stdout.readline())
        process.kill()


def test_a_fork_holds_the_memory_of_a_fresh_process(server, asking):
    _, fresh, _ = asking
    forked = server.call("memory")
    for kind in fresh:
        assert forked[kind] == pytest.approx(fresh[kind], rel=0.03)


def test_a_call_ends_with_the_process_that_asked_for_it(asking):
    process, _, pid = asking
    server = psutil.Process(pid)
    end = time.monotonic() + 30
    while not (children := server.children()) and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs([server, *children], timeout=30)
    assert len(gone) == 2
    assert not alive
