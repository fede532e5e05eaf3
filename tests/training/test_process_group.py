"""A rank on its own joins the group: DeepSpeed's operator is really compiled."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.launch import _free_port

ROOT = Path(__file__).resolve().parents[2]
CODE = "from training import process_group; process_group.join(); print('joined'); process_group.leave()"


def join(folder: Path) -> subprocess.Popen:
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # ninja lies there
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-c", CODE]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_build_that_was_killed_is_done_again(tmp_path):
    """Torch alone waits for ever: its lock is a file that only the process that made it removes."""
    first = join(tmp_path)
    deadline = time.monotonic() + 120
    while not (locks := list(tmp_path.glob("*/*/lock"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert locks and locks[0].exists()

    others = [join(tmp_path) for _ in range(2)]
    try:
        printed = [other.communicate(timeout=200)[0] for other in others]
    finally:
        for other in others:
            if other.poll() is None:
                os.killpg(other.pid, signal.SIGKILL)
    assert [other.returncode for other in others] == [0, 0]
    assert all(output.endswith("joined\n") for output in printed)
    assert sum("is of a build that was killed" in output for output in printed) == 1
    assert not locks[0].exists()
