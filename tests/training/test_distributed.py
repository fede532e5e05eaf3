"""A rank on its own joins the group, and builds an operator: DeepSpeed's own or a small one in its place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from condense.training.launch import _free_port

ROOT = Path(__file__).resolve().parents[2]
JOIN = "from training import distributed; distributed.join(); {}print('joined'); distributed.leave()"
BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; {}B().load(); "
# A second of compilation instead of half a minute.
SMALL_OPERATOR = """
#include <Python.h>
#include <bits/stdc++.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", "", -1};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


def join(code: str, **variables: object) -> subprocess.Popen:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # ninja lies there
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("operator", ["small", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_a_build_that_was_killed_is_done_again(operator, tmp_path):
    """Torch alone waits forever: its lock is a file that only the process that made it removes."""
    sources = ""
    if operator == "small":
        (tmp_path / "small.cpp").write_text(SMALL_OPERATOR)
        sources = f"B.sources = lambda _: [{str(tmp_path / 'small.cpp')!r}]; "
    code = JOIN.format(BUILD.format(sources))
    first = join(code, XDG_CACHE_HOME=tmp_path)
    deadline = time.monotonic() + 120
    while not (locks := list(tmp_path.rglob("lock"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert locks and locks[0].exists()

    others = [join(code, XDG_CACHE_HOME=tmp_path) for _ in range(2)]
    try:
        printed = [other.communicate(timeout=200)[0] for other in others]
    finally:
        for other in others:
            if other.poll() is None:
                os.killpg(other.pid, signal.SIGKILL)
    assert [other.returncode for other in others] == [0, 0]
    assert all(output.endswith("joined\n") for output in printed)
    assert sum("is left of a build that was killed" in output for output in printed) == 1
    assert not locks[0].exists()


def test_a_folder_of_the_users_is_used_as_it_is(tmp_path):
    """Others may build there: a process that waits for a lock prints it, and removes nothing."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    waiting = join(JOIN.format(BUILD.format("")), TORCH_EXTENSIONS_DIR=tmp_path)
    try:
        assert waiting.stdout.readline() == (
            f"waiting for {lock}: if nothing is building deepspeed_shm_comm, remove that file\n"
        )
        assert lock.exists() and waiting.poll() is None
    finally:
        os.killpg(waiting.pid, signal.SIGKILL)
        waiting.communicate()


def test_joining_builds_nothing(tmp_path):
    """DeepSpeed would compile an operator for inference, and leave a file in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    joining = join(JOIN.format(""), TORCH_EXTENSIONS_DIR=tmp_path)
    assert joining.communicate()[0].endswith("joined\n") and joining.returncode == 0
    assert not list(tmp_path.iterdir())
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "allreduce" in path.name]
