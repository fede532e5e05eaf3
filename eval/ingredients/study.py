"""Twins that differ in one thing, trained on whole tokens, and how they read fractions of tokens."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from transformers import AutoTokenizer, LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.continuity import ContinuousLM
from condense.files import atomic_folder
from condense.training.recipe import Recipe
from condense.training.small_llama import small_llama

from ..continuity.aggregation import SET, answers
from ..continuity.counts import Counting
from ..continuity.engine import Reader
from ..continuity.options import ProbeOptions
from ..continuity.questions import Adding, questions_tokenizer
from ..continuity.questions import Counting as CountingQuestions
from ..continuity.sums import Sums
from ..intervals import interval, shown
from ..options import stored
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results, Task
from ..training_runs import DTYPE, check_one_gpu, read_curve, remove_checkpoints, train_alone
from .options import FOLDED, INGREDIENTS, JITTER, LAYERS, STEPS, IngredientOptions
from .positions import PositionsForCausalLM, without_rotary

POSITIONS = ("learned", "no_positions")
NO_MODELS = ProbeOptions(models=[])
TEMPLATES = ("sentence", "listed")  # of questions to count
TOTAL_LENGTH = 40  # tokens of a text, at most
# Of the data of a figure in a table, the probe and the name in its summary.
FIGURES = {
    "counted right": ("counting", "right_at_1"),
    "peaks over counterfactual": ("counting", "ratio_expected"),
    "added right": ("sums", "right"),
    "P1": ("sums", "P1"),
    "P2": ("sums", "P2"),
    "P3": ("sums", "P3"),
}


class Trained(NamedTuple):
    ingredient: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.ingredient}-{self.seed}"


class Ingredients(Task[Trained]):
    """A record: `curve`, the validation loss in training; the `parameters`; the summaries of both probes."""

    kind = "ingredients"
    unit = "model"
    Options = IngredientOptions

    def __init__(self, options: IngredientOptions, output: Path):
        check_one_gpu()
        self.options, self.output = options, output

    def settings(self) -> dict[str, Any]:
        return stored(self.options) | {"dtype": DTYPE}

    def items(self) -> list[Trained]:
        return [
            Trained(ingredient, seed) for seed in range(self.options.seeds) for ingredient in self.options.ingredients
        ]

    def key(self, item: Trained) -> Key:
        return {"ingredient": item.ingredient, "seed": item.seed}

    def measure(self, item: Trained) -> Record:
        recipe = self.recipe(item)
        train_alone(recipe)
        model = self.load(item)
        # One anchor for all: with tables, too, since the first token lasts one unit and none has a position below 0.
        reader = Reader(ContinuousLM(model, "end"), AutoTokenizer.from_pretrained(recipe.output))
        remove_checkpoints(recipe.output)  # a run that is stopped until here resumes
        return {
            "curve": read_curve(recipe.output),
            "parameters": model.num_parameters(),
            **{probe.name(): self.probed(probe, reader) for probe in (Counting, Sums)},
        }

    def probed(self, probe: Any, reader: Reader) -> dict[str, Any]:
        """The summary of the first records of a probe's data set."""
        items = probe.prompts(replace(NO_MODELS, limit=self.options.records))
        summary = probe.summary([reader.record(item) for item in items if item.group == SET])
        if probe is Sums:
            summary["right"] = summary["valid"] / summary["records"]
        return summary

    def load(self, item: Trained) -> Any:
        """A trained model."""
        kind: Any = LlamaForCausalLM
        if item.ingredient in POSITIONS:
            kind = PositionsForCausalLM
        elif item.ingredient in (FOLDED, "jitter"):
            kind = CondenseForCausalLM
        model = kind.from_pretrained(self.recipe(item).output).eval()
        return model.to("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def inputs(self) -> Path:
        """The folder of the tokenizer, the questions and the models that training starts from."""
        settings = json.dumps(self.settings(), sort_keys=True)
        folder = self.output / "inputs" / hashlib.sha256(settings.encode()).hexdigest()[:12]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not (folder / "tokenizer").exists():
                with atomic_folder(folder / "tokenizer") as made:
                    counts = [replace(NO_MODELS, template=template) for template in TEMPLATES]
                    items = [*(item for asked in counts for item in Counting.prompts(asked)), *Sums.prompts(NO_MODELS)]
                    questions_tokenizer(item.text for item in items).save_pretrained(made)
        return folder

    def questions(self, seed: int) -> Path:
        """A file of questions, to count words and to add by turns: those of a seed are the same for all models."""
        path = self.inputs / f"questions-{seed}"
        with FileLock(self.inputs / ".questions-lock"):
            if not path.exists():
                counting, adding = CountingQuestions(random.Random(seed)), Adding(random.Random(seed))
                with atomic_folder(path) as folder, (folder / "train.jsonl").open("w", encoding="utf-8") as file:
                    for number in range(self.options.questions):
                        question = adding.question() if number % 2 else counting.words_question(TEMPLATES)
                        file.write(json.dumps(question) + "\n")
        return path / "train.jsonl"

    def start(self, item: Trained) -> Path:
        """A checkpoint with random weights: those of a seed are the same in all models of equal depth."""
        layers = LAYERS.get(item.ingredient, 2)
        name = item.ingredient if item.ingredient in POSITIONS else f"llama-{layers}"
        path = self.inputs / f"start-{name}-{item.seed}"
        with FileLock(self.inputs / ".start-lock"):
            if not path.exists():
                tokenizer = AutoTokenizer.from_pretrained(self.inputs / "tokenizer")
                model: Any = small_llama(tokenizer, item.seed, self.options.width, layers)
                if item.ingredient in POSITIONS:
                    model = without_rotary(model, TOTAL_LENGTH if item.ingredient == "learned" else None)
                with atomic_folder(path) as folder:
                    model.save_pretrained(folder)
                    tokenizer.save_pretrained(folder)
        return path

    def recipe(self, item: Trained) -> Recipe:
        """The recipe of a model, which `condense train` could run too, but for the models without rotary positions."""
        options, ingredient = self.options, item.ingredient
        steps = max(2, round(options.steps * STEPS.get(ingredient, 1)))
        quarter = max(1, steps // 4)
        model: dict[str, Any] = {"kind": "positions" if ingredient in POSITIONS else "stock"}
        if ingredient in (FOLDED, "jitter"):
            model = {"kind": "condense", "segment_length": options.segment_length}
        fields = {
            "model": {"source": str(self.start(item)), **model},
            "output": self.output / "models" / item.folder,
            "data": {
                "task": "questions",
                "sources": [{"files": str(self.questions(item.seed)), "text": "prompt", "summary": "answer"}],
                "prepared": self.output / "prepared",
            },
            "stages": [{"total_length": TOTAL_LENGTH, "steps": steps}],
            "global_batch": options.batch,
            "micro_batch": options.batch,
            "optimizer": {
                "learning_rate": options.learning_rate, "final_learning_rate": options.learning_rate / 100,
                "warmup_steps": max(1, steps // 16),
            },
            "dtype": DTYPE,
            "evaluation": {"every": max(1, steps // 8), "sequences": 128},
            "checkpoints": {"every": quarter, "keep": 1}, "log_every": quarter, "report_to": "none",
            "seed": item.seed,
        }  # fmt: skip
        if ingredient == "jitter":
            fields["objective"] = {"kind": "duration_jitter", "jitter": JITTER}
        return Recipe.model_validate(fields)

    def summarise(self, measured: Sequence[tuple[Trained, Record]]) -> dict[str, Any]:
        """`models`, each with the figures of both probes and `more`: how much they exceed those of the twin of its
        seed. A figure is None for a model that does not answer, and of sums where no sum is right."""
        figures = {item: _figures(record) for item, record in measured}
        models = []
        for item, record in measured:
            _, twin = INGREDIENTS[item.ingredient]
            of_twin = figures.get(Trained(twin, item.seed)) if twin else None
            models.append(
                {
                    **self.key(item),
                    "parameters": record["parameters"],
                    "validation": [point["loss"] for point in record["curve"]],
                    "figures": figures[item],
                    "more": of_twin and {name: _difference(figures[item][name], of_twin[name]) for name in FIGURES},
                    "counting": record["counting"],
                    "sums": record["sums"],
                }
            )
        return {"models": models, "seeds": self.options.seeds, "ingredients": list(self.options.ingredients)}

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        named = ("ingredient", "seed", "parameters")
        return [
            {name: model[name] for name in named}
            | model["figures"]
            | {f"{name}, more than the twin": value for name, value in (model["more"] or {}).items()}
            for model in results["models"]
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """A line an ingredient: the figures of its models, and how much they exceed those of their twins."""
        rows, differences = [], []
        for ingredient in results["ingredients"]:
            models, (name, twin) = _select(results, ingredient), INGREDIENTS[ingredient]
            size = f"{models[0]['parameters']:,}"
            rows.append([name, size, *(shown([model["figures"][figure] for model in models]) for figure in FIGURES)])
            if twin is not None and any(model["more"] for model in models):
                more = [model["more"] or dict.fromkeys(FIGURES) for model in models]
                compared = [shown([values[figure] for values in more]) for figure in FIGURES]
                differences.append([name, INGREDIENTS[twin][0], *compared])
        tables = [Table("how they read fractions", ["model", "parameters", *FIGURES], rows)]
        if differences:
            tables.append(Table("more than the twin of the same seed", ["model", "twin", *FIGURES], differences))
        return tables

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Each figure of each model; its mean and interval over seeds."""
        names = [INGREDIENTS[ingredient][0] for ingredient in results["ingredients"]]
        shown_figures = ("peaks over counterfactual", "P1", "P2", "P3")
        with picture(path, columns=len(shown_figures), figsize=(13, 4), sharey=True) as panels:
            for panel, figure in zip(panels, shown_figures, strict=True):
                for row, ingredient in enumerate(results["ingredients"]):
                    values = [model["figures"][figure] for model in _select(results, ingredient)]
                    known = [value for value in values if value is not None]
                    panel.plot(known, [row] * len(known), ".", color="0.6")
                    if known:
                        mean, low, high = interval(known)
                        panel.plot(mean, row, "o", color="tab:blue")
                        if low is not None:
                            panel.plot([low, high], [row, row], "-", color="tab:blue")
                panel.set_xlabel(figure)
                panel.grid(alpha=0.3)
            panels[0].set_yticks(range(len(names)), names)
            panels[0].invert_yaxis()


def _figures(record: Record) -> dict[str, float | None]:
    return {name: record[probe][field] if answers(record[probe]) else None for name, (probe, field) in FIGURES.items()}


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _select(results: Results, ingredient: str) -> list[dict[str, Any]]:
    return [model for model in results["models"] if model["ingredient"] == ingredient]
