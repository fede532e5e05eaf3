"""Starts a training run on this machine through the `deepspeed` launcher."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml

from .checkpoints.resume import how_to_resume
from .output_lock import was_finished
from .recipe import Recipe, load_recipe
from .subprocesses import child_environment, run_to_end

TRAIN = Path(__file__).with_name("train.py")
CPU_RANKS = 2
CPU_CONFIG = "zero2_cpu"


def num_ranks() -> int:
    """Returns one rank per GPU, or two on a CPU."""
    return torch.cuda.device_count() or CPU_RANKS


def load_local_recipe(named: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Loads the recipe as this machine runs it. Raises `ValueError` like `load_recipe`."""
    return load_recipe(named, local_overrides(overrides))


def local_overrides(overrides: Sequence[str]) -> list[str]:
    """Puts what this machine needs before the overrides: without a GPU, a DeepSpeed configuration for CPUs."""
    return [*overrides] if torch.cuda.is_available() else [f"deepspeed={CPU_CONFIG}", *overrides]


def launch(recipe: Recipe, ranks: int | None = None, checked: bool = False) -> None:
    """Runs `training/train.py` on `ranks` ranks that end with this process; they check the run unless `checked`.

    Raises `CalledProcessError` on failure; its exit code is `STOPPED` if a signal ended the run with a checkpoint.
    """
    ranks = ranks or num_ranks()
    environment = child_environment()
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # Trainer and DeepSpeed raise dozens
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        print(f"no GPU: on the CPU, ranks={ranks}, with {CPU_CONFIG} unless an override names another", flush=True)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, *_devices(ranks)]
    # If a signal stops a run, the launcher reports an error; the ranks' own messages say how they end.
    command += ["--log_level", "critical", "--master_port", str(_free_port())]
    # The launcher starts ranks with the first `python3` it finds.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with TemporaryDirectory() as folder:
        resolved = Path(folder) / "recipe.yaml"  # JSON has no infinite numbers
        resolved.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        command += [str(TRAIN), "--recipe", str(resolved), *(["--checked"] if checked else [])]
        exit_code = run_to_end(command, environment)
    # DeepSpeed's runner exits with 0 if its launcher was killed.
    if exit_code or not was_finished(recipe.output):
        raise subprocess.CalledProcessError(exit_code or 1, command)


def how_ranks_ended(exit_code: int, recipe: Recipe) -> str:
    """Explains a run's exit code; DeepSpeed's launcher passes on the code of the first rank to fail."""
    number = 256 - exit_code  # of the signal that ended the rank, if any
    if number not in set(signal.Signals):
        return f"training ended with exit code {exit_code}; the message of the rank that failed is above."
    name, often = signal.Signals(number).name, ", which the system sends when memory runs out"
    why = f"a rank received {name}{often if number == signal.SIGKILL else ''}"
    return f"training ended because {why}; {how_to_resume(recipe)}."


def _devices(ranks: int) -> list[str]:
    """Returns the launcher's options that choose devices; with `--num_gpus` it ignores CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if torch.cuda.is_available() else None
    if not visible:
        return ["--num_gpus", str(ranks)]
    numbers = visible.split(",")
    if not all(number.strip().isdecimal() for number in numbers) or ranks > len(numbers):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible}: {ranks} ranks need {ranks} GPUs, given by number for the launcher."
        )
    return ["--include", "localhost:" + ",".join(number.strip() for number in numbers[:ranks])]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
