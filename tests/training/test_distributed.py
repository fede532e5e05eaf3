"""A rank on its own joins the group: DeepSpeed's operator is really compiled."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.launch import _free_port

ROOT = Path(__file__).resolve().parents[2]
CODE = "from training import distributed; distributed.join(); print('joined'); distributed.leave()"


def join(**variables: object) -> subprocess.Popen:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # ninja lies there
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-c", CODE]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_build_that_was_killed_is_done_again(tmp_path):
    """Torch alone waits for ever: its lock is a file that only the process that made it removes."""
    first = join(XDG_CACHE_HOME=tmp_path)
    deadline = time.monotonic() + 120
    while not (locks := list(tmp_path.rglob("lock"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert locks and locks[0].exists()

    others = [join(XDG_CACHE_HOME=tmp_path) for _ in range(2)]
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
    """Others may build there: what waits for a lock says so, and nothing is taken away."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    waiting = join(TORCH_EXTENSIONS_DIR=tmp_path)
    try:
        assert waiting.stdout.readline() == (
            f"waiting for {lock}: if nothing is building deepspeed_shm_comm, remove that file\n"
        )
        assert lock.exists() and waiting.poll() is None
    finally:
        os.killpg(waiting.pid, signal.SIGKILL)
        waiting.communicate()
