"""Recipes of tests: what most of them have in common, and the texts that they read."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml


def write_recipe(
    folder: Path, model: Any, stages: Sequence[tuple[int, int]] | None, global_batch: int | None, **fields: Any
) -> Path:
    """Writes `folder`/recipe.yaml and returns its path: passkeys in float32, with a log line for each step.

    `stages` are lengths and their steps; `fields` are other keys of a recipe.
    """
    recipe = {
        "model": model,
        "output": str(folder / "output"),
        "data": {"task": "passkey", "shortest": 0.4},
        "stages": stages and [{"total_length": length, "steps": steps} for length, steps in stages],
        "global_batch": global_batch,
        "optimizer": {"warmup_steps": 1},
        "dtype": "float32",
        "log_every": 1,
        "report_to": "none",
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | fields))
    return path


def text_data(folder: Path, fit: str = "cut", files: str = "texts.jsonl") -> dict[str, Any]:
    """The `data` of a recipe that reads a file of the folder."""
    sources = [{"files": str(folder / files)}]
    return {"task": "text", "fit": fit, "sources": sources, "prepared": str(folder / "prepared")}


def write_texts(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_digits(folder: Path, lengths: Iterable[int]) -> None:
    """Writes texts.jsonl with texts of as many random digits."""
    texts = (" ".join(Random(number).choices("0123456789", k=length)) for number, length in enumerate(lengths))
    write_texts(folder / "texts.jsonl", texts)
