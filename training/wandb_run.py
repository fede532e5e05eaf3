"""The Weights & Biases run that an output reports to: always the same run, however often it resumes."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .recipe import Recipe

ID_FILE = "wandb.json"


@contextmanager
def wandb_run(recipe: Recipe) -> Iterator[None]:
    """Starts the run, or continues it by its id; Trainer's callback logs to it. Called by the first rank.

    Raises `ValueError` if W&B refuses, or if the id can't be read.
    """
    import wandb

    file = recipe.output / ID_FILE
    begun = _read_id(file)
    try:
        run = wandb.init(
            project=os.getenv("WANDB_PROJECT", "condense"),
            name=os.getenv("WANDB_NAME", recipe.output.resolve().name),
            id=begun,
            resume="allow",
            dir=recipe.output,
            # Trainer adds its own arguments and the model's configuration, some under the same names.
            config={"recipe": recipe.model_dump(mode="json")},
        )
    except wandb.Error as error:
        raise ValueError(
            f"report_to=wandb: {error}. Log in with `wandb login`, set WANDB_MODE=offline, or report_to=none."
        ) from error
    with run:
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps({"id": run.id}), encoding="utf-8")
        partial.replace(file)
        yield


def _read_id(file: Path) -> str | None:
    """Returns None if the output has not reported to W&B."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{file} has no id of a W&B run: {error}. Write {{"id": "RUN"}} into it, with the last part of the '
            "run's address, to continue that run; or delete it to begin another one."
        ) from error
