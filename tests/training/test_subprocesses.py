"""Ranks end with the process that started them, through DeepSpeed's real runner and launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from .runs import ROOT, launch_command

WAIT_S = 60  # for processes to begin
END_S = 20  # for processes to end
RANK = """
import os, sys, time
sys.path.insert(0, {root!r})
from condense.training.subprocesses import end_with_parents
end_with_parents()
open(os.path.join({folder!r}, "rank-" + os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(120)
"""
FRONT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
sys.path.insert(0, {root!r})
from condense.training.subprocesses import run_to_end
command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "2"]
sys.exit(run_to_end([*command, "--master_port", "0", {script!r}], os.environ | {{"DS_ACCELERATOR": "cpu"}}))
"""


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def tree(tmp_path) -> Iterator[dict[str, list[psutil.Process]]]:
    """A front process, DeepSpeed's runner and launcher, and two ranks that only wait."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(root=str(ROOT), folder=str(tmp_path)))
    code = FRONT.format(root=str(ROOT), script=str(script))
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ranks = [tmp_path / f"rank-{rank}" for rank in range(2)]
    assert wait_for(lambda: all(path.exists() and path.read_text() for path in ranks), WAIT_S)
    found = [psutil.Process(int(path.read_text())) for path in ranks]
    launcher = found[0].parent()
    processes = {"front": [psutil.Process(front.pid)], "runner": [launcher.parent()], "launcher": [launcher]}
    assert launcher.parent().ppid() == front.pid
    yield processes | {"ranks": found}
    for process in [front, *found, launcher, *processes["runner"]]:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()
    front.wait()


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("front", signal.SIGTERM),
        pytest.param("front", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("front", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("front", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("runner", signal.SIGTERM, marks=pytest.mark.slow),
        ("runner", signal.SIGKILL),
        pytest.param("launcher", signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else signal.Signals(value).name,
)
def test_no_rank_outlives_those_that_started_it(who, number, tree):
    everybody = [process for processes in tree.values() for process in processes]
    time.sleep(2)  # the control: as long as nobody is stopped, all continue
    assert all(map(is_alive, everybody))
    os.kill(tree[who][0].pid, number)
    if (who, number) == ("front", signal.SIGTERM):  # which can wait for the others
        assert wait_for(lambda: not is_alive(tree["front"][0]), END_S) and not any(map(is_alive, everybody))
    assert wait_for(lambda: not any(map(is_alive, everybody)), END_S), [p for p in everybody if is_alive(p)]


def test_a_command_that_ends_by_itself():
    from condense.training.subprocesses import run_to_end

    assert run_to_end([sys.executable, "-c", "import sys; sys.exit(3)"], os.environ) == 3


def test_a_hang_up_that_is_ignored_remains_so(tmp_path):
    """As under nohup: neither the front process nor what it runs ends."""
    code = f"import os, signal, sys\nsys.path.insert(0, {str(ROOT)!r})\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "from condense.training.subprocesses import run_to_end\n"
    code += "run_to_end([sys.executable, '-c', 'import time; time.sleep(60)'], os.environ)"
    front = subprocess.Popen([sys.executable, "-c", code])
    assert wait_for(lambda: psutil.Process(front.pid).children(), WAIT_S)
    (child,) = psutil.Process(front.pid).children()
    time.sleep(1)
    os.kill(front.pid, signal.SIGHUP)
    os.kill(child.pid, signal.SIGHUP)
    time.sleep(2)
    assert is_alive(child) and front.poll() is None
    front.terminate()
    assert front.wait(END_S) == 128 + signal.SIGTERM and not is_alive(child)


def test_a_parent_that_had_gone_before(tmp_path):
    """Its number is another process's by now, or nobody's."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    code += "from condense.training.subprocesses import end_with_parents\n"
    code += "end_with_parents()\nprint('went on')"
    environment = os.environ | {"CONDENSE_PARENT": str(gone.pid)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "has gone" in done.stderr and "went on" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("who", ["front", "runner", "launcher"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_real_run_ends_and_resumes(who, number, tmp_path):
    """`condense train`, stopped in its steps: no rank remains, the output is free again, and the run continues."""
    from condense.training.small_llama import save_small_llama

    save_small_llama(tmp_path / "start")
    recipe = ROOT / "training" / "recipes" / "passkey_quickstart.yaml"
    output = tmp_path / "out"
    options = [f"model={tmp_path / 'start'}", f"output={output}", "model.segment_length=40", "curriculum.steps=400"]
    options += ["curriculum.patience=10", "optimizer.warmup_steps=5", "optimizer.decay_steps=5", "checkpoints.every=10"]
    command = launch_command(recipe, *options)
    front = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = Path(output / "log.jsonl")
    assert wait_for(lambda: log.exists() and log.read_text().count("\n") > 2, 240)
    runner = psutil.Process(front.pid).children()[0]
    launcher = runner.children()[0]
    everybody = [runner, launcher, *launcher.children()]
    assert len(everybody) == 4
    os.kill({"front": front.pid, "runner": runner.pid, "launcher": launcher.pid}[who], number)
    assert front.wait(timeout=60) != 0
    assert wait_for(lambda: not any(map(is_alive, everybody)), END_S)
    from condense.training.output_lock import check_unlocked

    check_unlocked(output)
    lines = log.read_text()
    time.sleep(5)
    assert log.read_text() == lines
