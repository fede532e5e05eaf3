"""Where a run goes on: the right checkpoint, in a form that this number of ranks can load."""

import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from .checkpoints import check, newest_checkpoint
from .recipe import Recipe


def find_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint to go on from: the recipe's, or else the newest complete one. Raises `ValueError` for bad ones."""
    checkpoint = recipe.resume or newest_checkpoint(recipe.output)
    if checkpoint is not None:
        check(checkpoint)
    return checkpoint


def adapt(checkpoint: Path, ranks: int, zero_stage: int | None) -> bool:
    """True where the checkpoint must be loaded in DeepSpeed's universal form, which is then made here, once.

    ZeRO divides the optimizer's state among the ranks that wrote it; the universal form is undivided.
    """
    marker = check(checkpoint)
    if (marker["zero_stage"] is None) != (zero_stage is None):
        with_or_without = "without" if marker["zero_stage"] is None else "with"
        raise ValueError(f"checkpoint {checkpoint} was written {with_or_without} DeepSpeed: go on in the same way.")
    if (marker["ranks"], marker["zero_stage"]) == (ranks, zero_stage):
        return False
    with FileLock(checkpoint.parent / f".{checkpoint.name}.lock"):
        if not (checkpoint / "latest_universal").exists():  # written last
            print(f"{checkpoint} was written by {marker['ranks']} ranks: rewriting it for {ranks}", flush=True)
            shutil.rmtree(checkpoint / "universal", ignore_errors=True)
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            command += ["--input_folder", str(checkpoint / (checkpoint / "latest").read_text().strip())]
            command += ["--output_folder", str(checkpoint / "universal")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return True
