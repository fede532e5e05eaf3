"""A rank on its own joins the group, and builds an operator: DeepSpeed's own or a small one in its place."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from condense.training import distributed
from condense.training.launch import _free_port

from .ranks import FORKS
from .test_subprocesses import wait_for

pytestmark = pytest.mark.process

# A second of compilation instead of half a minute.
SMALL_OPERATOR = """
#include <Python.h>
#include <bits/stdc++.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", "", -1};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


def join_and_build(printed: Path, build: bool, sources: list[str], variables: dict[str, str]) -> None:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    os.setsid()  # so that what compiles can be killed with it
    os.environ |= variables
    with printed.open("w", buffering=1) as file, contextlib.redirect_stdout(file):
        distributed.join()
        if sources:
            ShareMemCommBuilder.sources = lambda _: sources
        if build:
            ShareMemCommBuilder().load()
        print("joined")
        distributed.leave()


def join(printed: Path, build=False, sources=(), **variables: object):
    """A process that joins a group of its own, and builds an operator."""
    environment = {name: str(value) for name, value in variables.items()}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja lies there
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    process = FORKS.Process(target=join_and_build, args=(printed, build, list(sources), environment))
    process.start()
    return process


def end(process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("operator", ["small", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_build_that_was_killed_is_done_again(operator, tmp_path):
    """Torch alone waits forever: its lock is a file that only the process that made it removes."""
    sources = []
    if operator == "small":
        sources = [str(tmp_path / "small.cpp")]
        (tmp_path / "small.cpp").write_text(SMALL_OPERATOR)
    first = join(tmp_path / "first", True, sources, XDG_CACHE_HOME=tmp_path)
    deadline = time.monotonic() + 120
    while not (locks := list(tmp_path.rglob("lock"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    end(first)
    assert locks and locks[0].exists()

    files = [tmp_path / f"printed-{number}" for number in range(2)]
    others = [join(file, True, sources, XDG_CACHE_HOME=tmp_path) for file in files]
    try:
        for other in others:
            other.join(200)
        assert [other.exitcode for other in others] == [0, 0]
    finally:
        for other in others:
            end(other)
    printed = [file.read_text() for file in files]
    assert all(output.endswith("joined\n") for output in printed)
    assert sum("is left from a build that was killed" in output for output in printed) == 1
    assert not locks[0].exists()


def test_a_folder_of_the_users_is_used_as_it_is(tmp_path):
    """Others may build there: a process that waits for a lock prints it, and removes nothing."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    waiting = join(tmp_path / "printed", True, TORCH_EXTENSIONS_DIR=tmp_path)
    try:
        assert wait_for(lambda: (tmp_path / "printed").exists() and (tmp_path / "printed").read_text(), 60)
        assert (tmp_path / "printed").read_text() == (
            f"waiting for {lock}: if nothing is building deepspeed_shm_comm, remove that file\n"
        )
        assert lock.exists() and waiting.is_alive()
    finally:
        end(waiting)


def test_joining_builds_nothing(tmp_path):
    """DeepSpeed would compile an operator for inference, and leave a file in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    (tmp_path / "built").mkdir()
    joining = join(tmp_path / "printed", TORCH_EXTENSIONS_DIR=tmp_path / "built")
    joining.join()
    assert (tmp_path / "printed").read_text().endswith("joined\n") and joining.exitcode == 0
    assert not list((tmp_path / "built").iterdir())
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "allreduce" in path.name]
