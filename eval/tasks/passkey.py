"""Passkey retrieval on a grid of length x depth, by the model's own decoding (figure 8 of the paper)."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.chat import chat_frame, end_tokens
from condense.training.data.passkey import PasskeyTask

from .. import paper
from ..models import EvaluatedModel, generate, load_models, rows_per_batch, state_bytes
from ..options import stored
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results, Task
from ..statistics import wilson
from .chat import check_chat, shown_name
from .grids import count_cells, heat_map
from .options import PasskeyOptions

CHAT_TOKENS = 32  # of an answer in a chat, which is a sentence


class Batch(NamedTuple):
    """Prompts of one cell of the grid of a model; they depend on the seed, the length and the depth alone."""

    model: EvaluatedModel
    length: int  # tokens, answer included
    depth_index: int
    depth: float
    first: int  # number of the first prompt in its cell
    size: int


class Passkey(Task[Batch]):
    """The number in the decoded answer must be the key, digit by digit.

    It begins the answer, which is a completion; in a chat it is the first number of the answer.

    A record counts the `correct` ones of `total` answers; `state_bytes` is the state of one prompt at the end. Raises
    `ValueError` for lengths below the frame of the prompt.
    """

    kind = "passkey"
    unit = "batch"
    Options = PasskeyOptions

    def __init__(self, options: PasskeyOptions, models: Sequence[EvaluatedModel]):
        self.options, self.models = options, models
        self.prompts = {
            model.name: PasskeyTask(
                model.tokenizer,
                options.num_keys,
                options.num_digits,
                chat_frame(model.tokenizer) if model.name in options.chat else None,
            )
            for model in models
        }
        for prompts in self.prompts.values():  # too short a length is refused before anything is measured
            prompts.batch(1, min(options.lengths), np.random.default_rng(0))

    @classmethod
    def load(cls, options: PasskeyOptions) -> "Passkey":
        check_chat(options.chat, options.models)
        return cls(options, load_models(options.models, options.dtype, options.attention, options.device_map))

    def settings(self) -> dict[str, Any]:
        return stored(self.options) | {"models": [model.describe() for model in self.models]}

    def items(self) -> list[Batch]:
        options = self.options
        return [
            Batch(model, length, index, depth, first, min(size, options.num_prompts - first))
            for model in self.models
            for length in options.lengths
            for size in [rows_per_batch(model, length)]
            for index, depth in enumerate(options.depths)
            for first in range(0, options.num_prompts, size)
        ]

    def key(self, item: Batch) -> Key:
        return {**_cell(item), "first_prompt": item.first}

    @torch.no_grad()
    def measure(self, item: Batch) -> Record:
        model, tokenizer, prompts = item.model.model, item.model.tokenizer, self.prompts[item.model.name]
        generator = np.random.default_rng([self.options.seed, item.length, item.depth_index])
        for _ in range(item.first):  # a cell's prompts are drawn one after another, however they are batched
            prompts.batch(1, item.length, generator, item.depth)
        passkeys = prompts.batch(item.size, item.length, generator, item.depth)
        chat, find_number = item.model.name in self.options.chat, first_number
        ending: dict[str, Any] = {"max_new_tokens": passkeys.answer_ids_BA.shape[1]}  # what follows is not asked for
        if chat:
            find_number = stated_number
            ending = {"max_new_tokens": CHAT_TOKENS, "eos_token_id": sorted(end_tokens(model, tokenizer, chat)) or None}
        sequences, cache = generate(
            model,
            passkeys.prompt_ids_BN,
            torch.ones_like(passkeys.prompt_ids_BN),
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            **ending,
        )
        answers = tokenizer.batch_decode(sequences[:, passkeys.prompt_ids_BN.shape[1] :])
        correct = sum(find_number(answer) == key for answer, key in zip(answers, passkeys.keys, strict=True))
        return {"chat": chat, "correct": correct, "total": item.size, "state_bytes": state_bytes(cache) // item.size}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """`cells`: of each its `accuracy` with the bounds `low` and `high` (Wilson, 95 %)."""
        given = self.options.longest_trained
        cells = count_cells(measured, lambda item, record: {**_cell(item), "chat": record["chat"]})
        return {
            "lengths": list(self.options.lengths),
            "longest_trained": {model.name: given or _trained_length(model.source) for model in self.models},
            "cells": cells,
        }

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return results["cells"]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """By length, all depths together; one column of accuracies and one of state bytes per model.

        The last column is the paper's, where the keys are of its kind and a length is one of its own.
        """
        names = [model["name"] for model in results["models"]]
        columns = ["tokens"]
        for name in names:
            columns += [f"{shown_name(name, results)}: % correct", "95 % interval", "state [KiB]"]
        rows = []
        for length in results["lengths"]:
            row: list[Any] = [f"{length:,}"]
            for name in names:
                cells = [cell for cell in results["cells"] if (cell["model"], cell["length"]) == (name, length)]
                correct, total = (sum(cell[field] for cell in cells) for field in ("correct", "total"))
                low, high = wilson(correct, total)
                kib = max(cell["state_bytes"] for cell in cells) / 1024
                row += [f"{100 * correct / total:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{kib:,.1f}"]
            rows.append(row)
        is_like = all(results.get(name) == value for name, value in paper.PASSKEY_SETTINGS.items())
        if is_like and any(length in paper.PASSKEY for length in results["lengths"]):
            columns.append("paper: % correct")
            for row, length in zip(rows, results["lengths"], strict=True):
                row.append(paper.PASSKEY.get(length, ""))
        return [Table("passkey retrieval, all depths together", columns, rows)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """A heat map per model."""
        models, lengths, depths = results["models"], results["lengths"], results["depths"]
        size = (1.2 + 0.62 * len(lengths), (1.7 + 0.42 * len(depths)) * len(models))
        with picture(path, rows=len(models), figsize=size, squeeze=False) as panels:
            for axes, model in zip(panels[:, 0], models, strict=True):
                _heat_map(axes, model["name"], results, lengths, depths)


def _cell(item: Batch) -> dict[str, Any]:
    return {"model": item.model.name, "length": item.length, "depth": item.depth}


def first_number(answer: str) -> str:
    """The digits at the start of an answer; tokenizers may put spaces between them."""
    digits = ""
    for character in "".join(answer.split()):
        if not character.isdigit():
            break
        digits += character
    return digits


def stated_number(answer: str) -> str:
    """The first number in a sentence; tokenizers may put spaces between its digits."""
    found = re.search(r"\d.*", answer, re.DOTALL)
    return first_number(found[0]) if found else ""


def _trained_length(source: str) -> int | None:
    """The longest text of the recipe beside the model; None where there is no recipe."""
    recipe, curriculum = Path(source) / "recipe.json", Path(source) / "curriculum.json"
    if curriculum.is_file():
        segments = json.loads(curriculum.read_text(encoding="utf-8"))["milestones"][-1][1]
        return segments * json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))["segment_length"]
    if not recipe.is_file():
        return None
    stages = json.loads(recipe.read_text(encoding="utf-8")).get("stages") or []
    return max((stage["total_length"] for stage in stages), default=None)


def _heat_map(axes: Any, name: str, results: dict[str, Any], lengths: Sequence[int], depths: Sequence[float]) -> None:
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell in results["cells"]:
        if cell["model"] == name and cell["length"] in lengths:
            grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = 100 * cell["accuracy"]
    heat_map(axes, grid, [f"{100 * depth:.0f} %" for depth in depths], [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the key")
    shown = shown_name(name, results)
    axes.set_title(shown, fontsize=10)
    trained = results["longest_trained"][name]
    if trained and trained < lengths[-1]:
        border = sum(length <= trained for length in lengths) - 0.5
        axes.axvline(border, color="black", linewidth=2)
        axes.text(border + 0.05, -0.62, "never trained", fontsize=8, ha="left")
        axes.text(border - 0.05, -0.62, "trained", fontsize=8, ha="right")
        axes.set_title(shown, fontsize=10, pad=18)
