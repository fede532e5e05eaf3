"""Where a run goes on: the right checkpoint, in a form that this number of ranks can load."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

from .checkpoint_pickles import check_pickles
from .checkpoints import check, newest_checkpoint
from .recipe import Recipe

# What a run may change when it goes on: it alters neither the batches nor what is learned from them.
FREE = {"output", "resume", "report_to", "deepspeed", "attention", "schedule", "micro_batch"}
FREE |= {"gradient_checkpointing", "offload_memories"}
FREE |= {"max_skipped_steps", "checkpoints.keep", "data.prepared"}


def find_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint to go on from: the output's newest complete one, or else `resume`.

    Raises `ValueError` for a damaged one, for one that could run code when it is loaded, and for one that another
    recipe has written: the optimizer's and the schedule's state would outvote the new values.
    """
    checkpoint = newest_checkpoint(recipe.output) or recipe.resume
    if checkpoint is not None:
        before, now = _flat(check(checkpoint)["recipe"]), _flat(recipe.model_dump(mode="json"))
        changed = [name for name in before | now if name not in FREE and before.get(name) != now.get(name)]
        if changed:
            was = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
            raise ValueError(
                f"checkpoint {checkpoint} comes from another recipe: {was}. A run goes on as it began: undo the "
                f"change, or begin another run from these weights with model={checkpoint} output=FOLDER."
            )
        check_pickles(checkpoint)
    return checkpoint


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def adapt(checkpoint: Path, ranks: int, zero_stage: int | None) -> bool:
    """True where the checkpoint must be loaded in DeepSpeed's universal form, which is then made here, once.

    ZeRO divides the optimizer's state among the ranks that wrote it; the universal form is undivided.
    """
    marker = check(checkpoint)
    if (marker["zero_stage"] is None) != (zero_stage is None):
        with_or_without = "without" if marker["zero_stage"] is None else "with"
        raise ValueError(f"checkpoint {checkpoint} was written {with_or_without} DeepSpeed: go on in the same way.")
    if marker["zero_stage"] != zero_stage and 3 in (marker["zero_stage"], zero_stage):
        raise ValueError(
            f"checkpoint {checkpoint} was written under ZeRO-{marker['zero_stage']}, and deepspeed says "
            f"ZeRO-{zero_stage}: ZeRO-3 and the others can't read each other's optimizer state. Go on in the same way."
        )
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
