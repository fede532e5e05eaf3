"""Questions about facts in long text, on a grid of length x kind of question, by the model's own decoding."""

import hashlib
import math
from collections import Counter, defaultdict
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

from ..models import EvaluatedModel
from ..results import Table, remove_picture
from ..results_store import Record
from ..runner import Results
from ..statistics import wilson
from ..tables import key_by, pivot, select
from .evaluation import complete, kibibytes, naming_length, shown_name, state_unit, with_interval
from .grids import Batch, Grid, pool
from .options import FactsOptions

GUESSED = "unguessed_correct", "unguessed_total", "others_said", "others_total"  # of a record, see `Facts`
SEED = 2**41  # added to the seed of the prompts, so texts differ from training and its validation


class Facts(Grid):
    """Counts an answer as right if it is exactly the tokens of the right word.

    `guess` is the last word of the right sort in the facts that the question does not name. A record counts the prompts
    whose answer is a different word, `unguessed_total`, and the right answers to them, `unguessed_correct`.
    `others_total` counts the prompts answered by `guess` that have another such word, and `others_said` those where the
    model says one.

    Raises `ValueError` for lengths too short for the facts, a tokenizer that does not know their words, or data without
    text.
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
            model.name: FactsTask(model.tokenizer, options.kinds, options.num_facts, sentences) for model in self.models
        }
        shortest = min(options.lengths)
        for name, task in self.tasks.items():  # refuses lengths that are too short before anything is measured
            with naming_length(shortest, name):
                task.check_fits(shortest)

    @staticmethod
    def label(row: str) -> str:
        return row.replace("_", " ")

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"text": self.text, "unguessed": True}  # older records lack these counts

    def measure(self, item: Batch) -> Record:
        task, row = self.tasks[item.model.name], list(KINDS).index(item.row)
        prompts = [
            task.prompt(item.row, item.length, np.random.default_rng([SEED + self.options.seed, item.length, row, n]))
            for n in range(item.first, item.first + item.size)
        ]
        prompt_ids_BN = torch.from_numpy(np.stack([prompt.input_ids for prompt in prompts]))
        found_BN, state = complete(item.model, prompt_ids_BN, task.longest_answer)
        answers = list(zip(found_BN.tolist(), prompts, strict=True))
        is_right = [answer[: len(prompt.answer)] == prompt.answer for answer, prompt in answers]
        unguessed = [right for right, prompt in zip(is_right, prompts, strict=True) if not prompt.is_guessed]
        others = [
            any(answer[: len(other)] == other for other in prompt.others)
            for answer, prompt in answers
            if prompt.is_guessed and prompt.others
        ]
        counts = zip(GUESSED, (sum(unguessed), len(unguessed), sum(others), len(others)), strict=True)
        return {"correct": sum(is_right), "total": item.size, **dict(counts), "state_bytes": state}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """Returns the cells, and `tracked`: per cell the share of texts whose facts the model knows, `accuracy`, with
        bounds (see `tracked`). `guesses` and `others` are accuracies by kind without tracking: of `guess`, and of a
        random other such word if `guess` is wrong."""
        accuracies = {kind: guess_accuracies(kind, self.options.num_facts) for kind in self.options.kinds}
        others = {kind: other for kind, (_, other) in accuracies.items()}
        counts = defaultdict[tuple[Any, ...], Counter[str]](Counter)
        for item, record in measured:
            counts[tuple(self._cell(item).items())].update({field: record[field] for field in GUESSED})
        shares = []
        for key, count in counts.items():
            cell: dict[str, Any] = dict(key)
            other = others[cell["kind"]]
            if count["others_total"] and count["unguessed_total"] and other is not None:
                share, low, high = estimate_tracked(**count, other=other)
                shares.append(cell | dict(count) | {"accuracy": share, "low": low, "high": high})
        return super().summarise(measured) | {
            "kinds": list(self.options.kinds),
            "guesses": {kind: guessed for kind, (guessed, _) in accuracies.items()},
            "others": others,
            "tracked": shares,
        }

    @classmethod
    def variant(cls, results: Results) -> str:
        kinds = [kind for kind in KINDS if kind in results["kinds"]]
        return "" if kinds == list(KINDS) else f" ({', '.join(map(cls.label, kinds))})"

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns each model's accuracy by kind and length, over all kinds, and the bytes of the state, beside the
        accuracy of `guess`. Adds the share of texts whose facts are tracked, unless `guess` is always right or the
        results are too old."""
        guesses = {kind: results["guesses"][kind] for kind in results["kinds"]}
        kinds = {(kind,): [cls.label(kind), f"{100 * guess:.1f}"] for kind, guess in guesses.items()}
        lengths, tables = {length: f"{length:,} tokens" for length in results["lengths"]}, []
        for name in (model["name"] for model in results["models"]):
            shown, cells = shown_name(name, results), select(results["cells"], model=name)
            title, head = f"{shown}: % of right answers (95 % interval)", ["kind", "the last such word"]
            right = pivot(title, head, key_by(cells, "kind", "length"), kinds, lengths, with_interval)
            every = [select(cells, length=length) for length in lengths]
            mean = f"{100 * fmean(guesses.values()):.1f}"
            right.rows.append(["all", mean, *(with_interval(pool(column)) for column in every)])
            right.rows.append([f"state [{state_unit(results, name)}]", "-", *map(kibibytes, every)])
            tables.append(right)
            if shares := key_by(select(results.get("tracked", []), model=name), "kind", "length"):
                title = f"{shown}: % of texts whose facts are tracked (95 % interval)"
                rows = {kind: names[:1] for kind, names in kinds.items()}
                tables.append(pivot(title, ["kind"], shares, rows, lengths, with_interval))
        return tables

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws the pictures of every grid, and heat maps of the tracked shares in PATH-tracked."""
        super().draw(results, path)
        of_tracked = path.with_name(f"{path.name}-tracked")
        remove_picture(of_tracked)
        if results.get("tracked"):
            shares = results | {"cells": results["tracked"]}
            cls._heat_maps(shares, of_tracked, "% of texts whose facts are tracked")


def estimate_tracked(
    *, others_said: int, others_total: int, unguessed_correct: int, unguessed_total: int, other: float
) -> tuple[float, float, float]:
    """Returns the share of texts in which a model knows who did what, with a 95 % interval.

    Suppose a model knows it in a share t of the texts and says a random word except `guess` in a share c. If `guess` is
    wrong, that word is right in a share `other`, so u = t + c other of the answers are right. If `guess` is right, a
    share c of the answers is wrong. So t = u - c other. This is 0 for random answers without knowledge, and up to about
    0.15 c more if the model prefers some words. Wilson's distances to the bounds of c and u are combined as squares.
    """
    said, right = others_said / others_total, unguessed_correct / unguessed_total
    (said_low, said_high), (low, high) = wilson(others_said, others_total), wilson(unguessed_correct, unguessed_total)
    share = right - said * other
    below = math.hypot(right - low, other * (said_high - said))
    above = math.hypot(high - right, other * (said - said_low))
    return share, share - below, share + above
