"""Where a run resumes: the right checkpoint, in a form that this number of ranks can load."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..recipe import Recipe
from ..recipe.section import may_change
from .complete import check, newest_checkpoint
from .pickles import check_pickles


def find_checkpoint(recipe: Recipe) -> Path | None:
    """The checkpoint to resume from: the output's newest complete one, or else `resume`.

    Raises `ValueError` for a damaged one, for one that could run code when it is loaded, and for one that another
    recipe has written: the restored state of the optimizer and the learning rate would override the new values.
    """
    checkpoint = newest_checkpoint(recipe.output) or recipe.resume
    if checkpoint is not None:
        before, now = _flat(migrate(check(checkpoint)["recipe"])), _flat(recipe.model_dump(mode="json"))
        free = may_change(Recipe)
        changed = [name for name in before | now if name not in free and before.get(name) != now.get(name)]
        if changed:
            was = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
            raise ValueError(
                f"checkpoint {checkpoint} comes from another recipe: {was}. A run resumes under the recipe it began "
                f"with: undo the change, or start another run from these weights with model={checkpoint} "
                "output=FOLDER."
            )
        check_pickles(checkpoint)
    return checkpoint


def migrate(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a checkpoint under today's keys.

    Before models had kinds, `model` was a text and the fields of a folded model lay beside it; the optimizer was AdamW
    with the betas and eps given here.
    """
    if not isinstance(recipe["model"], str):
        return recipe
    others = {name: value for name, value in recipe.items() if name not in ("model", "folded")}
    names = ("segment_length", "bptt_segments", "schedule", "offload_memories")
    folded = {name: others.pop(name) for name in names if name in others}
    if recipe["folded"]:
        model = {"kind": "condense", "source": recipe["model"], **folded}
    else:
        model = {"kind": "llama", "source": recipe["model"]}
    optimizer = {"name": "adamw", "beta1": 0.9, "eps": 1e-8, **recipe["optimizer"]}
    return others | {"model": model, "objective": {"kind": "next_token"}, "optimizer": optimizer}


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def make_universal(checkpoint: Path, ranks: int, zero_stage: int | None) -> bool:
    """Whether the checkpoint must be loaded in DeepSpeed's universal form, which is then made here, once.

    ZeRO divides the optimizer's state among the ranks that wrote it; the universal form is undivided. Raises
    `ValueError` for a checkpoint that can't be loaded under this ZeRO stage in either form.
    """
    marker = check(checkpoint)
    if (marker["zero_stage"] is None) != (zero_stage is None):
        with_or_without = "without" if marker["zero_stage"] is None else "with"
        raise ValueError(f"checkpoint {checkpoint} was written {with_or_without} DeepSpeed: resume it in the same way.")
    if marker["zero_stage"] != zero_stage and 3 in (marker["zero_stage"], zero_stage):
        raise ValueError(
            f"checkpoint {checkpoint} was written under ZeRO-{marker['zero_stage']}, and deepspeed says "
            f"ZeRO-{zero_stage}: ZeRO-3 and the others can't read each other's optimizer state. Resume it under the "
            "same stage."
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
