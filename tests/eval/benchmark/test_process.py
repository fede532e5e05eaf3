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

ROOT = Path(__file__).resolve().parents[3]

held: list[bytes] = []


def behave(kind: str) -> object:
    """One function of several behaviours: a server has one function."""
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


def test_calls_run_in_the_folder_of_the_caller(tmp_path, monkeypatch):
    """Where a relative path, such as that of snapshots, means the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with ForkServer(behave) as elsewhere:
        assert elsewhere.call("folder") == str(tmp_path)


def test_a_killed_and_a_failing_call_are_told_apart(server):
    with pytest.raises(ProcessKilledError, match="killed"):
        server.call("killed")
    with pytest.raises(RuntimeError, match="(?s)exit code 1.*ValueError: the reason") as failed:
        server.call("failing")
    assert not isinstance(failed.value, ProcessKilledError)
    with pytest.raises(RuntimeError) as again:
        server.call("failing")
    assert str(again.value).count("Traceback") == 1  # of this call alone
    assert server.call("ordinary")["calls"] == 1


def test_a_server_that_is_killed_is_replaced(server):
    first = server.call("ordinary")["parent"]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ProcessKilledError):
        server.call("ordinary")
    assert server.call("ordinary")["parent"] != first


def test_a_fork_holds_the_memory_of_a_fresh_process(server):
    code = "import torch; from tests.eval.benchmark import test_process; print(test_process.resident())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    fresh, forked = eval(done.stdout), server.call("memory")
    for kind in fresh:
        assert forked[kind] == pytest.approx(fresh[kind], rel=0.03)


def test_a_call_ends_with_the_process_that_asked_for_it():
    code = (
        "from condense.eval.benchmark.process import ForkServer; from tests.eval.benchmark.test_process import behave\n"
    )
    code += "with ForkServer(behave) as server: print(server.call('ordinary')['parent'], flush=True)\n"
    code = code[:-1] + "; server.call('sleeping')"
    asking = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert asking.stdout is not None
    server = psutil.Process(int(asking.stdout.readline()))
    end = time.monotonic() + 30
    while not (children := server.children()) and time.monotonic() < end:
        time.sleep(0.1)
    asking.kill()
    asking.wait()
    gone, alive = psutil.wait_procs([server, *children], timeout=30)
    assert len(gone) == 2
    assert not alive
