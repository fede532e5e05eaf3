"""Questions about facts in long text, on a grid of length x kind of question, by the model's own decoding."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from condense.training.data.fact_kinds import KINDS, guess_accuracies
from condense.training.data.facts import FactsTask
from condense.training.data.generated import read_sentences
from condense.training.recipe import Source

from ..models import EvaluatedModel, generate, load_models, state_bytes
from ..results import Table
from ..results_store import Record
from ..runner import Results
from ..statistics import wilson
from .grids import Batch, Grid, count_cells, pooled
from .options import FactsOptions

SEED = 2**41  # added to the seed of the prompts: other texts than those of training and its validation


class Facts(Grid):
    """The answer must be exactly the tokens of the right word.

    A record also counts the `unguessed_correct` of the `unguessed_total` prompts in which `guess`, the last word of the
    right sort that the facts say and the question does not name, is not the answer.

    Raises `ValueError` for lengths that do not hold the facts, for a tokenizer that does not know their words, and for
    data without text.
    """

    kind = "facts"
    row = "kind"
    row_title = "kind of question"
    Options = FactsOptions

    def __init__(self, options: FactsOptions, models: Sequence[EvaluatedModel]):
        super().__init__(options, models)
        sources = [Source(files=files, text=options.text_field) for files in options.data]
        sentences = list(read_sentences(sources)) if sources else None
        self.text = hashlib.sha256(repr(sentences).encode()).hexdigest()[:16]
        self.tasks = {
            model.name: FactsTask(model.tokenizer, options.kinds, options.num_facts, sentences) for model in models
        }
        for task in self.tasks.values():  # too short a length is refused before anything is measured
            task.check_fits(min(options.lengths))

    @classmethod
    def load(cls, options: FactsOptions) -> "Facts":
        return cls(options, load_models(options.models, options.dtype, options.attention, options.device_map))

    @staticmethod
    def label(row: str) -> str:
        return row.replace("_", " ")

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"text": self.text, "unguessed": True}  # older records have no such counts

    @torch.no_grad()
    def measure(self, item: Batch) -> Record:
        task, row = self.tasks[item.model.name], list(KINDS).index(item.row)
        prompts = [
            task.prompt(item.row, item.length, np.random.default_rng([SEED + self.options.seed, item.length, row, n]))
            for n in range(item.first, item.first + item.size)
        ]
        prompt_ids_BN = torch.from_numpy(np.stack([prompt.input_ids for prompt in prompts]))
        sequences, cache = generate(
            item.model.model,
            prompt_ids_BN,
            torch.ones_like(prompt_ids_BN),
            do_sample=False,
            pad_token_id=item.model.tokenizer.pad_token_id,
            max_new_tokens=task.longest_answer,
        )
        said = sequences[:, prompt_ids_BN.shape[1] :].tolist()
        is_right = [answer[: len(prompt.answer)] == prompt.answer for answer, prompt in zip(said, prompts, strict=True)]
        unguessed = [right for right, prompt in zip(is_right, prompts, strict=True) if not prompt.is_guessed]
        return {
            "correct": sum(is_right),
            "total": item.size,
            "unguessed_correct": sum(unguessed),
            "unguessed_total": len(unguessed),
            "state_bytes": state_bytes(cache) // item.size,
        }

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """The cells, and `tracked`: of each its share of texts in which the model knows who did what, as `accuracy`,
        with bounds (see `tracked`). `guesses` and `others` are the accuracies by kind of readers who track nothing: of
        `guess`, and where it is wrong, of another such word at random."""
        accuracies = {kind: guess_accuracies(kind, self.options.num_facts) for kind in self.options.kinds}
        others = {kind: other for kind, (_, other) in accuracies.items()}
        found = super().summarise(measured)
        counted = [
            (item, record | {"correct": record["unguessed_correct"], "total": record["unguessed_total"]})
            for item, record in measured
            if record["unguessed_total"]
        ]
        cells = {tuple(self._key(cell)): cell for cell in found["cells"]}
        shares = []
        for unguessed in count_cells(counted, lambda item, _: self._cell(item)):
            cell, other = cells[tuple(self._key(unguessed))], others[unguessed["kind"]]
            guessed = cell["correct"] - unguessed["correct"], cell["total"] - unguessed["total"]
            if guessed[1] and other is not None:
                share, low, high = tracked(*guessed, unguessed["correct"], unguessed["total"], other)
                shares.append(unguessed | {"accuracy": share, "low": low, "high": high})
        return found | {
            "kinds": list(self.options.kinds),
            "guesses": {kind: guessed for kind, (guessed, _) in accuracies.items()},
            "others": others,
            "tracked": shares,
        }

    def _key(self, cell: dict[str, Any]) -> list[Any]:
        return [cell["model"], cell["length"], cell["kind"]]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Of each model the accuracy by kind and length, of all kinds together, and the bytes of the state, beside the
        accuracy of `guess`; and the share of texts whose facts are tracked, unless `guess` is always right, or older
        results do not have it."""
        lengths, kinds, tables = results["lengths"], results["kinds"], []
        columns = [f"{length:,} tokens" for length in lengths]

        def line(cells: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[list[dict[str, Any]]]:
            return [[cell for cell in cells if cell["length"] == n and cell["kind"] in kinds] for n in lengths]

        for name in (model["name"] for model in results["models"]):
            cells, shares = (
                [cell for cell in results.get(which, []) if cell["model"] == name] for which in ("cells", "tracked")
            )
            guesses = [results["guesses"][kind] for kind in kinds]
            rows = [
                [label, f"{100 * fmean(guess):.1f}", *(_share(pooled(found)) for found in line(cells, some))]
                for label, guess, some in [
                    *((cls.label(kind), [guess], [kind]) for kind, guess in zip(kinds, guesses, strict=True)),
                    ("all", guesses, kinds),
                ]
            ]
            held = [max(cell["state_bytes"] for cell in cells if cell["length"] == length) for length in lengths]
            rows.append(["state [KiB]", "-", *(f"{num_bytes / 1024:,.1f}" for num_bytes in held)])
            title = f"{name}: % of right answers (95 % interval)"
            tables.append(Table(title, ["kind", "the last such word", *columns], rows))
            if shares:
                rows = [
                    [cls.label(kind), *(_share(found[0]) if found else "-" for found in line(shares, [kind]))]
                    for kind in kinds
                ]
                tables.append(
                    Table(f"{name}: % of texts whose facts are tracked (95 % interval)", ["kind", *columns], rows)
                )
        return tables

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Those of every grid; and heat maps of the shares that are tracked in PATH-tracked."""
        super().draw(results, path)
        if results.get("tracked"):
            shares = results | {"cells": results["tracked"]}
            cls._heat_maps(shares, path.with_name(f"{path.name}-tracked"), "% of texts whose facts are tracked")


def tracked(
    guessed_correct: int, guessed_total: int, unguessed_correct: int, unguessed_total: int, other: float
) -> tuple[float, float, float]:
    """The share of texts in which a model knows who did what, with a 95 % interval, from its answers where `guess` is
    right and where it is wrong.

    A model that knows it in a share t of the texts, and else says `guess` or another such word at random, which is
    right in a share `other` of the texts where `guess` is wrong, is right with a probability g where `guess` is right
    and u = t + (1 - g) other where it is wrong: t = u - (1 - g) other, and 0 for a reader who knows nothing. The
    distances to the bounds are those of Wilson's bounds of g and u, added as squares.
    """
    guessed, unguessed = guessed_correct / guessed_total, unguessed_correct / unguessed_total
    bounds = zip(wilson(guessed_correct, guessed_total), wilson(unguessed_correct, unguessed_total), strict=True)
    below, above = (math.hypot(other * (guessed - of_guessed), unguessed - of_other) for of_guessed, of_other in bounds)
    share = unguessed - (1 - guessed) * other
    return share, share - below, share + above


def _share(cell: dict[str, Any]) -> str:
    share, low, high = (100 * cell[field] for field in ("accuracy", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"
