"""The run of Weights & Biases that an output reports to: one run, however often it resumes."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .recipe import Recipe

ID_FILE = "wandb.json"


@contextmanager
def wandb_run(recipe: Recipe) -> Iterator[None]:
    """Begins the run, or continues it by its id; Trainer's callback logs to it. Called by the first rank.

    Raises `ValueError` where W&B refuses it.
    """
    import wandb

    file = recipe.output / ID_FILE
    try:
        run = wandb.init(
            project=os.getenv("WANDB_PROJECT", "condense"),
            name=os.getenv("WANDB_NAME", recipe.output.resolve().name),
            id=json.loads(file.read_text(encoding="utf-8"))["id"] if file.exists() else None,
            resume="allow",
            dir=recipe.output,
            # Trainer adds its own arguments and the model's configuration, some under the same names.
            config={"recipe": recipe.model_dump(mode="json")},
        )
    except wandb.Error as error:
        raise ValueError(
            f"report_to=wandb: {error}. Log in with `wandb login`, set WANDB_MODE=offline, or report_to=none."
        ) from error
    file.write_text(json.dumps({"id": run.id}), encoding="utf-8")
    with run:
        yield
