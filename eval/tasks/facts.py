"""Questions about facts in long text, on a grid of length x kind of question, by the model's own decoding."""

import hashlib
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
        """The cells, and as `unguessed` those of the prompts in which `guess` is wrong. `guesses` and `others` are the
        accuracies of readers who track nothing: by kind of `guess`, and there of another such word at random."""
        accuracies = {kind: guess_accuracies(kind, self.options.num_facts) for kind in self.options.kinds}
        unguessed = [
            (item, record | {"correct": record["unguessed_correct"], "total": record["unguessed_total"]})
            for item, record in measured
            if record["unguessed_total"]
        ]
        return super().summarise(measured) | {
            "kinds": list(self.options.kinds),
            "guesses": {kind: guessed for kind, (guessed, _) in accuracies.items()},
            "others": {kind: other for kind, (_, other) in accuracies.items()},
            "unguessed": count_cells(unguessed, lambda item, _: self._cell(item)),
        }

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Of each model the accuracy by kind and length, of all kinds together, and the bytes of the state; and the
        accuracy where `guess` is wrong, unless there are no such prompts, or older results do not have it.

        Beside each the accuracy of a reader who tracks nothing.
        """
        lengths, kinds, tables = results["lengths"], results["kinds"], []
        columns = [f"{length:,} tokens" for length in lengths]

        def shares(cells: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
            return [_share([cell for cell in cells if cell["length"] == n and cell["kind"] in kinds]) for n in lengths]

        for name in (model["name"] for model in results["models"]):
            cells, unguessed = (
                [cell for cell in results.get(which, []) if cell["model"] == name] for which in ("cells", "unguessed")
            )
            guesses = results["guesses"]
            rows = [[cls.label(kind), f"{100 * guesses[kind]:.1f}", *shares(cells, [kind])] for kind in kinds]
            rows.append(["all", f"{100 * fmean(guesses.values()):.1f}", *shares(cells, kinds)])
            held = [max(cell["state_bytes"] for cell in cells if cell["length"] == length) for length in lengths]
            rows.append(["state [KiB]", "-", *(f"{num_bytes / 1024:,.1f}" for num_bytes in held)])
            title = f"{name}: % of right answers (95 % interval)"
            tables.append(Table(title, ["kind", "the last such word", *columns], rows))
            if unguessed:
                others = {
                    kind: "-" if other is None else f"{100 * other:.1f}" for kind, other in results["others"].items()
                }
                rows = [[cls.label(kind), others[kind], *shares(unguessed, [kind])] for kind in kinds]
                title += " where the last such word is wrong"
                tables.append(Table(title, ["kind", "another such word at random", *columns], rows))
        return tables

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Those of every grid; and heat maps where `guess` is wrong in PATH-unguessed."""
        super().draw(results, path)
        if results.get("unguessed"):
            unguessed = results | {"cells": results["unguessed"]}
            title = "where the last such word of the facts is wrong"
            cls._heat_maps(unguessed, path.with_name(f"{path.name}-unguessed"), title)


def _share(cells: Sequence[dict[str, Any]]) -> str:
    if not cells:
        return "-"
    together = pooled(cells)
    share, low, high = (100 * together[field] for field in ("accuracy", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"
