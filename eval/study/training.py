"""The recipes that a study trains in its own process."""

import hashlib
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from condense.hub.adapters import RECIPE
from condense.training.output_lock import was_finished
from condense.training.recipe import Recipe
from condense.training.train import train
from condense.utils.files import atomic_folder

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
PAPERS_MEMORY = {"memory_share": 1.0, "sink_token_id": None}  # for models that learn to use it from random weights
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_one_gpu() -> None:
    """Raises `ValueError` for several GPUs: experiments train in one process."""
    if (number := torch.cuda.device_count()) > 1:
        raise ValueError(
            f"this process sees {number} GPUs, and models are trained on one: set CUDA_VISIBLE_DEVICES=0, or "
            "another number."
        )


def study_recipe(
    *,
    model: dict[str, Any],
    data: dict[str, Any],
    output: Path,
    stage: tuple[int, int],
    batch: int,
    optimizer: dict[str, Any],
    evaluation: dict[str, Any] | None,
    seed: int,
    parts: int = 4,
    dtype: str = DTYPE,
    **fields: Any,
) -> Recipe:
    """Returns the recipe of one of a study's models, which `condense train` could also run.

    `stage` has the tokens of a text and the number of steps. A checkpoint is written after each of its `parts`.
    """
    length, steps = stage
    every = max(1, steps // parts)
    common = {
        "model": model, "data": data, "output": output, "stages": [{"total_length": length, "steps": steps}],
        "global_batch": batch, "micro_batch": batch, "optimizer": optimizer, "evaluation": evaluation, "dtype": dtype,
        "checkpoints": {"every": every, "keep": 1}, "log_every": every, "report_to": "none", "seed": seed,
    }  # fmt: skip
    return Recipe.model_validate(common | fields)


def anneal(learning_rate: float, steps: int, **more: Any) -> dict[str, Any]:
    """Returns a recipe's optimizer; the learning rate rises over 1/16 of the steps and falls to 1/100."""
    schedule = {"final_learning_rate": learning_rate / 100, "warmup_steps": max(1, steps // 16)}
    return {"learning_rate": learning_rate, **schedule, **more}


def place(model: Any) -> Any:
    """Returns the model to be measured, on the device."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def train_alone(recipe: Recipe) -> None:
    """Trains in this process, even if it is one of several that share a measurement, and prints nothing.

    A run that has finished is not repeated, though its checkpoints are removed.
    Raises `ValueError` for several GPUs, or if the loss or the gradient is not finite.
    """
    check_one_gpu()
    begun = recipe.output / RECIPE
    if was_finished(recipe.output) and begun.exists() and begun.read_text() == recipe.model_dump_json(indent=2):
        return
    taken = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about names that transformers changes
            train(recipe)
    except FloatingPointError as error:
        raise ValueError(f"{recipe.output}: {error} A lower learning rate may help.") from error
    finally:
        os.environ.update(taken)


def make_once(path: Path, write: Callable[[Path], None]) -> Path:
    """Returns the folder `path`, which `write` fills if it is missing; other processes that want it say so and wait.

    Removes what a killed process left of the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for the process that makes {path}", file=sys.stderr)
        lock.acquire()
    try:
        if not path.exists():
            for left in path.parent.glob(f".{path.name}.*.partial"):
                shutil.rmtree(left)
            with atomic_folder(path) as folder:
                write(folder)
    finally:
        lock.release()
    return path


def inputs_folder(output: Path, settings: dict[str, Any]) -> Path:
    """Returns the folder of the inputs to training, one for each set of settings."""
    return output / "inputs" / fingerprint(settings)


def fingerprint(value: Any) -> str:
    """Returns the first digits of the SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def remove_checkpoints(output: Path) -> None:
    """Removes checkpoints, because optimizer states take several times the space of the trained model."""
    for folder in output.glob("checkpoint-*"):
        shutil.rmtree(folder)


def read_curve(output: Path) -> list[dict[str, float]]:
    """Returns the validation losses by step, as training has logged them."""
    lines = map(json.loads, (output / "log.jsonl").read_text(encoding="utf-8").splitlines())
    found = {
        line["step"]: {
            name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_loss")
        }
        for line in lines
        if "eval_loss" in line
    }
    return [{"step": step, **{n: v for n, v in losses.items() if "segment" not in n}} for step, losses in found.items()]
