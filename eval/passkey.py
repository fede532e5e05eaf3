"""Passkey retrieval on a grid of length x depth, by the model's own decoding (figure 8 of the paper)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from training.data.passkey import PasskeyTask

from .models import Subject, generate, load_subjects, state_bytes
from .records import Records, open_records
from .results import Table, circumstances, picture, write_results
from .statistics import wilson

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS_PER_BATCH = 2**18


def passkey(
    models: Sequence[str],
    output: Path,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    num_prompts: int = 20,
    num_keys: int = 1,
    num_digits: int = 4,
    seed: int = 0,
    longest_trained: int | None = None,
    dtype: str = "auto",
    attention: str = "auto",
) -> dict[str, Any]:
    """Measures models (folders or hub ids, `NAME=FOLDER` for a name), and writes output/passkey.*.

    `longest_trained` is drawn as a border; None: what the recipe beside the model says, if there is one.
    Stopped and called again with the same arguments, it goes on.
    """
    for name, values in (("lengths", lengths), ("depths", depths)):
        if len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)} names a cell of the grid twice: it would be counted twice.")
    subjects = load_subjects(list(models), dtype, attention)
    settings = {
        "models": [subject.describe() for subject in subjects],
        "depths": list(depths),
        "num_prompts": num_prompts,
        "num_keys": num_keys,
        "num_digits": num_digits,
        "seed": seed,
    }
    with open_records(output / "passkey.records.jsonl", settings) as records:
        cells = []
        for subject in subjects:
            cells += measure_passkey(subject, lengths, depths, num_prompts, num_keys, num_digits, seed, records)
        trained = {subject.name: longest_trained or _trained_length(subject.source) for subject in subjects}
        results = {
            "kind": "passkey",
            **circumstances(),
            **settings,
            "lengths": list(lengths),
            "longest_trained": trained,
            "cells": cells,
        }
        write_results(output / "passkey", results, cells)
        draw(results, output / "passkey")
    return results


@torch.no_grad()
def measure_passkey(
    subject: Subject,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    num_prompts: int = 20,
    num_keys: int = 1,
    num_digits: int = 4,
    seed: int = 0,
    records: Records | None = None,
) -> list[dict[str, Any]]:
    """One record per cell of the grid: the number in the decoded answer must be the key, digit by digit.

    `length` is in tokens, answer included; `low` and `high` bound the accuracy (Wilson, 95 %); `state_bytes`
    is what the model held at the end, for the prompts of one batch. Prompts depend on `seed`, `length` and
    depth alone. Raises `ValueError` for lengths below the prompt's frame.
    """
    task, cells = PasskeyTask(subject.tokenizer, num_keys, num_digits), []
    records = records or Records(None, {})
    task.batch(1, min(lengths), np.random.default_rng(0))  # what does not fit is refused before anything runs
    with tqdm(total=len(lengths) * len(depths), unit="cell", desc=f"passkey {subject.name}") as bar:
        for length in lengths:
            for place, depth in enumerate(depths):
                key = {"model": subject.name, "length": length, "depth": depth}
                generator = np.random.default_rng([seed, length, place])

                def measure(length=length, depth=depth, generator=generator) -> dict[str, Any]:
                    return _measure_cell(subject, task, length, depth, num_prompts, generator)

                cells.append({**key, **records.get(key, measure)})
                bar.update()
    return cells


def _measure_cell(
    subject: Subject, task: PasskeyTask, length: int, depth: float, num_prompts: int, generator: np.random.Generator
) -> dict[str, Any]:
    correct = done = held = 0
    while done < num_prompts:
        num_rows = min(num_prompts - done, max(1, TOKENS_PER_BATCH // length))
        passkeys = task.batch(num_rows, length, generator, depth)
        num_prompt = passkeys.prompt_ids_BN.shape[1]
        sequences, cache = generate(
            subject.model,
            passkeys.prompt_ids_BN,
            torch.ones_like(passkeys.prompt_ids_BN),
            max_new_tokens=passkeys.answer_ids_BA.shape[1],  # what follows an answer is not part of the task
            do_sample=False,
            pad_token_id=subject.tokenizer.pad_token_id,
        )
        answers = subject.tokenizer.batch_decode(sequences[:, num_prompt:])
        correct += sum(first_number(answer) == key for answer, key in zip(answers, passkeys.keys, strict=True))
        held = state_bytes(cache) // num_rows
        done += num_rows
    low, high = wilson(correct, num_prompts)
    return {
        "correct": correct,
        "total": num_prompts,
        "accuracy": correct / num_prompts,
        "low": low,
        "high": high,
        "state_bytes": held,
    }


def first_number(answer: str) -> str:
    """The digits that an answer begins with; tokenizers may put spaces between them."""
    digits = ""
    for character in "".join(answer.split()):
        if not character.isdigit():
            break
        digits += character
    return digits


def _trained_length(source: str) -> int | None:
    """The longest text of the recipe that the model was trained with, where that is known."""
    recipe, curriculum = Path(source) / "recipe.json", Path(source) / "curriculum.json"
    if curriculum.is_file():
        segments = json.loads(curriculum.read_text(encoding="utf-8"))["milestones"][-1][1]
        return segments * json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))["segment_length"]
    if not recipe.is_file():
        return None
    stages = json.loads(recipe.read_text(encoding="utf-8")).get("stages") or []
    return max((stage["total_length"] for stage in stages), default=None)


def tables(results: dict[str, Any]) -> list[Table]:
    """By length, all depths together; one column of accuracies and one of state per model."""
    names = [model["name"] for model in results["models"]]
    columns = ["tokens"]
    for name in names:
        columns += [f"{name}: % correct", "95 % interval", "state [KiB]"]
    rows = []
    for length in results["lengths"]:
        row: list[Any] = [f"{length:,}"]
        for name in names:
            cells = [cell for cell in results["cells"] if (cell["model"], cell["length"]) == (name, length)]
            correct, total = (sum(cell[field] for cell in cells) for field in ("correct", "total"))
            low, high = wilson(correct, total)
            held = max(cell["state_bytes"] for cell in cells) / 1024
            row += [f"{100 * correct / total:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{held:,.1f}"]
        rows.append(row)
    return [Table("passkey retrieval, all depths together", columns, rows)]


def draw(results: dict[str, Any], path: Path) -> None:
    """A heat map per model."""
    models, lengths, depths = results["models"], results["lengths"], results["depths"]
    size = (1.2 + 0.62 * len(lengths), (1.7 + 0.42 * len(depths)) * len(models))
    with picture(path, rows=len(models), figsize=size, squeeze=False) as panels:
        for axes, model in zip(panels[:, 0], models, strict=True):
            _heat_map(axes, model["name"], results, lengths, depths)


def _heat_map(axes: Any, name: str, results: dict[str, Any], lengths: Sequence[int], depths: Sequence[float]) -> None:
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell in results["cells"]:
        if cell["model"] == name and cell["length"] in lengths:
            grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = 100 * cell["accuracy"]
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        color = "black" if 15 < value < 85 else "white"  # the ends of the scale are dark
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the key")
    axes.set_title(name, fontsize=10)
    trained = results["longest_trained"][name]
    if trained and trained < lengths[-1]:
        border = sum(length <= trained for length in lengths) - 0.5
        axes.axvline(border, color="black", linewidth=2)
        axes.text(border + 0.05, -0.62, "never trained", fontsize=8, ha="left")
        axes.text(border - 0.05, -0.62, "trained", fontsize=8, ha="right")
        axes.set_title(name, fontsize=10, pad=18)
    axes.figure.colorbar(image, ax=axes, label="% correct")
