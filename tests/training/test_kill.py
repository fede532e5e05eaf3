"""Runs that are killed again and again end as one that never was."""

import hashlib
import random
import subprocess
import time
from pathlib import Path

import pytest

from condense.training.checkpoints.complete import MARKER

from .runs import ROOT, folded_recipe, kill_tree, launch_command, log_lines, run

KILLS = 20


def weights_hash(output: Path) -> str:
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


def kill(process: subprocess.Popen, output: Path) -> None:
    kill_tree(process)
    deadline = time.monotonic() + 20
    while _ranks(output) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _ranks(output)


def _ranks(output: Path) -> list[str]:
    found = subprocess.run(["pgrep", "-f", f"train.py.*output={output}"], capture_output=True, text=True)
    return found.stdout.split()


def is_writing(output: Path) -> bool:
    """A checkpoint has files and no marker."""
    return any(not (folder / MARKER).exists() for folder in output.glob("checkpoint-*"))


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path):
    """In bfloat16 with dropout on two ranks: the same losses and weights, bit for bit."""
    fields = {"dtype": "bfloat16", "attention": "eager", "attention_dropout": 0.1, "gradient_checkpointing": True}
    fields |= {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 2}, "checkpoints": {"every": 2, "keep": 2}}
    fields |= {"evaluation": {"every": 40, "sequences": 3}}
    recipe = folded_recipe(tmp_path, (120, 60), (200, 60), global_batch=8, micro_batch=2, **fields)
    losses, _ = run(recipe, tmp_path / "whole")

    chance, output = random.Random(0), tmp_path / "broken"
    kills, in_writing = 0, 0
    while kills < KILLS:
        process = subprocess.Popen(
            launch_command(recipe, f"output={output}"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if kills % 2:  # at any moment, from the start of the launcher on
            time.sleep(chance.uniform(1, 16))
        else:  # while a checkpoint is being written
            before = set(output.glob("checkpoint-*"))
            while process.poll() is None and not (set(output.glob("checkpoint-*")) - before and is_writing(output)):
                pass
            time.sleep(chance.uniform(0, 0.03))
        assert process.poll() is None, "the run ended before it could be killed: give it more steps"
        kill(process, output)
        kills += 1
        in_writing += is_writing(output)
        print(f"kill {kills}: {sorted(path.name for path in output.glob('checkpoint-*'))}", flush=True)
    all_losses, printed = run(recipe, output)
    print(
        f"{kills} kills, {in_writing} of them left a checkpoint without its marker; "
        f"{printed.count('resuming from')} resumed"
    )
    assert in_writing >= KILLS // 4
    assert all_losses == losses
    assert [line["step"] for line in log_lines(output)] == list(range(1, 121))
    assert weights_hash(output) == weights_hash(tmp_path / "whole")
