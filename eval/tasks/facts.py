"""Questions about facts in long text, on a grid of length x kind of question, by the model's own decoding."""

import hashlib
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from condense.training.data.fact_kinds import KINDS, guess_accuracy
from condense.training.data.facts import FactsTask
from condense.training.data.generated import read_sentences
from condense.training.recipe import Source

from ..models import EvaluatedModel, generate, load_models, state_bytes
from ..results import Table
from ..results_store import Record
from ..runner import Results
from .grids import Batch, Grid, pooled
from .options import FactsOptions

SEED = 2**41  # added to the seed of the prompts: other texts than those of training and its validation


class Facts(Grid):
    """The answer must be exactly the tokens of the right word.

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
        return super().settings() | {"text": self.text}

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
        pairs = zip(said, prompts, strict=True)
        correct = sum(answer[: len(prompt.answer)] == prompt.answer for answer, prompt in pairs)
        return {"correct": correct, "total": item.size, "state_bytes": state_bytes(cache) // item.size}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        guesses = {kind: guess_accuracy(kind, self.options.num_facts) for kind in self.options.kinds}
        return super().summarise(measured) | {"kinds": list(self.options.kinds), "guesses": guesses}

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """One per model: the accuracy by kind and length, of all kinds together, and the bytes of the state.

        Beside it the accuracy of a reader who says the last word of the right sort, whatever the question is.
        """
        lengths, tables = results["lengths"], []
        for model in results["models"]:
            name = model["name"]
            cells = [cell for cell in results["cells"] if cell["model"] == name]
            by_kind = [(cls.label(kind), [kind]) for kind in results["kinds"]]
            rows = [
                [
                    label,
                    f"{100 * fmean(results['guesses'][kind] for kind in kinds):.1f}",
                    *(_share(cell for cell in cells if cell["length"] == n and cell["kind"] in kinds) for n in lengths),
                ]
                for label, kinds in [*by_kind, ("all", results["kinds"])]
            ]
            held = [max(cell["state_bytes"] for cell in cells if cell["length"] == length) for length in lengths]
            rows.append(["state [KiB]", "-", *(f"{num_bytes / 1024:,.1f}" for num_bytes in held)])
            columns = ["kind", "the last such word", *(f"{length:,} tokens" for length in lengths)]
            tables.append(Table(f"{name}: % of right answers (95 % interval)", columns, rows))
        return tables


def _share(cells: Iterable[dict[str, Any]]) -> str:
    together = pooled(list(cells))
    share, low, high = (100 * together[field] for field in ("accuracy", "low", "high"))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"
