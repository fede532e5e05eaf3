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

from condense.training.subprocesses import INTERVAL_S, PLEASE_SAVE, end_with_parents, run_all_to_end, run_to_end

from .ranks import FORKS, run_ranks
from .runs import ROOT, launch_command

pytestmark = pytest.mark.process

WAIT_S = 60  # for processes to begin
END_S = 20  # for processes to end
# The package without what `import condense` loads, which these ranks do not use.
RANK = """
import os, sys, time, types
package = sys.modules["condense"] = types.ModuleType("condense")
package.__path__ = [os.path.join({root!r}, "condense")]
from condense.training.subprocesses import end_with_parents
end_with_parents()
open(os.path.join({folder!r}, "rank-" + os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(120)
"""


def run_front(script: str) -> None:
    """Runs two ranks of a script to their end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "2"]
    command += ["--master_port", "0", script]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    sys.exit(run_to_end(command, os.environ | {"DS_ACCELERATOR": "cpu"}, **streams))


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
    front = FORKS.Process(target=run_front, args=(str(script),))
    front.start()
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
    front.join()


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
    time.sleep(2 * INTERVAL_S)  # the control: as long as nobody is stopped, all continue
    assert all(map(is_alive, everybody))
    os.kill(tree[who][0].pid, number)
    if (who, number) == ("front", signal.SIGTERM):  # which can wait for the others
        assert wait_for(lambda: not is_alive(tree["front"][0]), END_S) and not any(map(is_alive, everybody))
    assert wait_for(lambda: not any(map(is_alive, everybody)), END_S), [p for p in everybody if is_alive(p)]


def test_a_command_that_ends_by_itself():
    assert run_to_end([sys.executable, "-c", "import sys; sys.exit(3)"], os.environ) == 3


SAVES = """
import pathlib, signal, sys, time
delay, folder = float(sys.argv[1]), pathlib.Path(sys.argv[2])
def save(*_):
    time.sleep(delay)
    (folder / f"saved-{delay}").touch()
    sys.exit(75)
signal.signal(signal.Signals(int(sys.argv[3])), save)
(folder / f"begun-{delay}").touch()
time.sleep(60)
"""


def run_two_that_save(folder: str) -> None:
    commands = [
        (
            [sys.executable, "-c", SAVES, str(delay), folder, str(int(PLEASE_SAVE[signal.SIGTERM])), "--local_rank=0"],
            os.environ,
        )
        for delay in (0.1, 2.0)
    ]
    sys.exit(run_all_to_end(commands))


def test_the_first_that_has_saved_waits_for_the_others(tmp_path):
    front = FORKS.Process(target=run_two_that_save, args=(str(tmp_path),))
    front.start()
    assert wait_for(lambda: len(list(tmp_path.glob("begun-*"))) == 2, WAIT_S)
    front.terminate()
    front.join(END_S)
    assert front.exitcode == 75 and {path.name for path in tmp_path.glob("saved-*")} == {"saved-0.1", "saved-2.0"}


def run_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_to_end([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)


def test_a_hang_up_that_is_ignored_remains_so():
    """As under nohup: neither the front process nor what it runs ends."""
    front = FORKS.Process(target=run_under_nohup)
    front.start()
    assert wait_for(lambda: psutil.Process(front.pid).children(), WAIT_S)
    (child,) = psutil.Process(front.pid).children()
    time.sleep(0.3)
    os.kill(front.pid, signal.SIGHUP)
    os.kill(child.pid, signal.SIGHUP)
    time.sleep(1)
    assert is_alive(child) and front.is_alive()
    front.terminate()
    front.join(END_S)
    assert front.exitcode == 128 + signal.SIGTERM and not is_alive(child)


def go_on_after(parent: int) -> None:
    os.environ["CONDENSE_PARENT"] = str(parent)
    end_with_parents()
    print("went on")


def test_a_parent_that_had_gone_before():
    """Its number is another process's by now, or nobody's."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    succeeded, printed = run_ranks(go_on_after, gone.pid, ranks=1)
    assert not succeeded and "has gone" in printed and "went on" not in printed
    assert run_ranks(go_on_after, os.getpid(), ranks=1) == (True, "went on\n")  # the control: one that is there


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
