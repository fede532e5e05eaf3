"""A run that fails says why once: in the sentence of the rank that failed first."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

import condense.cli.main
from condense import CondenseForCausalLM
from condense.training import launch, train
from condense.training.recipe import load_recipe

from .ranks import run_ranks
from .runs import folded_recipe, launch_from_a_shell, rank_arguments, train_with

pytestmark = pytest.mark.process


def recipe_in(folder: Path) -> Path:
    return folded_recipe(folder, (100, 3), global_batch=2, checkpoints={"every": 1}, output=str(folder / "out"))


def train_until_one_fails(arguments: list[str], failing: str, patience: float) -> None:
    def forward(self, *args, **kwargs):
        raise ValueError("the third page is missing")

    train.LAUNCHER_S = patience
    if os.environ["RANK"] == failing:
        CondenseForCausalLM.forward = forward
    train_with(arguments)


@pytest.mark.parametrize("failing", ["0", "1"])
def test_the_others_are_silent_until_the_launcher_has_ended_them(tmp_path, failing):
    arguments = rank_arguments(recipe_in(tmp_path), tmp_path / "out")
    succeeded, printed = run_ranks(train_until_one_fails, arguments, failing, 60)
    assert not succeeded and "Traceback" not in printed and "can't be reached" not in printed
    said = "train: the third page" if failing == "0" else "train, rank 1: the third page"
    assert printed.count(f"{said} is missing") == 1, printed


def test_ranks_that_nobody_ends_say_one_sentence(tmp_path):
    """As under torchrun on another machine."""
    arguments = rank_arguments(recipe_in(tmp_path), tmp_path / "out")
    succeeded, printed = run_ranks(train_until_one_fails, arguments, "1", 0)
    assert not succeeded and "Traceback" not in printed
    (said,) = [line for line in printed.splitlines() if "can't be reached" in line]
    assert "train, rank 0: the other ranks can't be reached (" in said and said.endswith("its message says why.")


def test_errors_of_the_group_and_others(monkeypatch):
    for error in (dist.DistNetworkError("EADDRINUSE\nframe #1"), dist.DistStoreError("timeout")):
        monkeypatch.setattr(train, "load_recipe", lambda *_, error=error: (_ for _ in ()).throw(error))
        monkeypatch.setattr(train, "LAUNCHER_S", 0)
        monkeypatch.setattr("sys.argv", ["train.py", "--recipe", "r"])
        with pytest.raises(SystemExit, match=str(error).splitlines()[0]) as ended:
            train.main()
        assert "frame" not in str(ended.value)
    monkeypatch.setattr(train, "load_recipe", lambda *_: (_ for _ in ()).throw(RuntimeError("a fault of ours")))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        train.main()


def launch_script(script: str, recipe: Path) -> None:
    """The launch of ranks that run a script in the place of training/train.py."""
    launch.TRAIN = Path(script)
    try:
        launch_from_a_shell(recipe, [], 2)
    except subprocess.CalledProcessError as error:
        print(f"exit code {error.returncode}: {launch.how_ranks_ended(error.returncode, load_recipe(recipe))}")


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("sys.exit(75)", "exit code 75: "),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(60)", "a rank received SIGKILL, which the system"),
    ],
    ids=["stopped", "killed"],
)
def test_the_launcher_adds_nothing(tmp_path, ends, said):
    """DeepSpeed's own runner and launcher, which would report the exit code of a stopped run as an error."""
    script = tmp_path / "rank.py"
    hello = "os.write(1, f'hello {rank}\\n'.encode())"  # at once: both ranks write to one pipe
    # The launcher ends the other rank with the first one, so each waits until both have started.
    meet = (
        "open(f'{__file__}.{rank}', 'w').close()\nwhile not os.path.exists(f'{__file__}.{1 - rank}'): time.sleep(0.01)"
    )
    script.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{hello}\n{meet}\n{ends}\n")
    recipe = recipe_in(tmp_path)
    succeeded, printed = run_ranks(launch_script, str(script), recipe, ranks=1)
    assert succeeded and said in printed, printed
    lines = [line for line in printed.splitlines() if line]
    assert sorted(line for line in lines if "no GPU" not in line and "exit code" not in line and said not in line) == [
        "hello 0",
        "hello 1",
    ], printed


def test_exit_codes_in_words(monkeypatch, capsys, tmp_path):
    recipe = load_recipe(recipe_in(tmp_path), [f"output={tmp_path / 'out'}"])
    said = launch.how_ranks_ended(1, recipe)
    assert said == "training ended with exit code 1; the message of the rank that failed is above."
    said = launch.how_ranks_ended(256 - signal.SIGTERM, recipe)
    assert "received SIGTERM; there is no checkpoint yet, so the same command begins the run anew" in said
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-3" / "complete.json").touch()
    said = launch.how_ranks_ended(256 - signal.SIGTERM, recipe)
    assert f"received SIGTERM; the same command resumes it from {tmp_path / 'out' / 'checkpoint-3'}." in said
    shutil.rmtree(tmp_path / "out")

    def fail(*args, **options):
        raise subprocess.CalledProcessError(256 - signal.SIGSEGV, "deepspeed")

    monkeypatch.setattr(launch, "launch", fail)
    with pytest.raises(ValueError, match="a rank received SIGSEGV; there is no checkpoint yet"):
        condense.cli.main.train(str(recipe_in(tmp_path)), [f"output={tmp_path / 'out'}"])
