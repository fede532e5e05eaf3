"""Twins that differ in one thing, trained on whole tokens, and how they read fractions of tokens."""

import json
import math
import random
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.eval.intervals import format_mean, mean_and_interval
from condense.eval.options import identify
from condense.eval.results import Table, picture
from condense.eval.results_store import Record
from condense.eval.runner import Results
from condense.eval.study.study import Study
from condense.eval.study.training import (
    DTYPE,
    PAPERS_MEMORY,
    anneal,
    fingerprint,
    inputs_folder,
    make_once,
    place,
    study_recipe,
)
from condense.eval.tables import select
from condense.labs.continuity.model import ContinuousLM
from condense.labs.continuity.study.aggregation import SET, answers
from condense.labs.continuity.study.counts import Counting
from condense.labs.continuity.study.engine import Reader
from condense.labs.continuity.study.items import Item
from condense.labs.continuity.study.options import ProbeOptions
from condense.labs.continuity.study.probe import Probe
from condense.labs.continuity.study.questions import Adding, questions_tokenizer
from condense.labs.continuity.study.questions import Counting as CountingQuestions
from condense.labs.continuity.study.sums import Sums
from condense.training.recipe import Recipe
from condense.training.small_llama import small_llama

from .options import INGREDIENTS, TOTAL_LENGTH, IngredientOptions
from .positions import PositionsForCausalLM, without_rotary

# By the model's kind in a recipe.
CLASSES: dict[str, Any] = {
    "stock": LlamaForCausalLM,
    "condense": CondenseForCausalLM,
    "positions": PositionsForCausalLM,
}
NO_MODELS = ProbeOptions(models=[])
TEMPLATES = ("sentence", "listed")  # for questions to count
# Figures in the tables, with the probe that gives them and their names in its summary. At whole tokens:
WHOLE = {"whole words counted right": ("counting", "right_at_1"), "first digit of sums right": ("sums", "right")}
# With fractions of tokens, for models that answer:
FRACTIONS = {
    "expected peaks over counterfactual": ("counting", "ratio_expected"),
    "distance of counts from repetitions x duration": ("counting", "proportion_error"),
    "P1": ("sums", "P1"),
    "P2": ("sums", "P2"),
    "P3": ("sums", "P3"),
}
FIGURES = WHOLE | FRACTIONS
ABOVE_ONE = ("expected peaks over counterfactual", "distance of counts from repetitions x duration")


class Trained(NamedTuple):
    ingredient: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.ingredient}-{self.seed}"


class Ingredients(Study[Trained]):
    """A record has `curve`, the validation loss in training, the `parameters`, and the summaries of both probes."""

    kind = "ingredients"
    unit = "model"
    Options = IngredientOptions
    about = (
        "Models that differ from a twin in one thing, trained alike to count words and to add numbers as whole tokens; "
        "then words and numbers shrink. The probe of counting gives the peaks, at most the mean number of repetitions "
        "over the counterfactual. The probe of sums gives P1, P2 and P3, by the rule of the paper's text, among the "
        "sums whose first digit is right. Intervals are t intervals over seeds."
    )

    def settings(self) -> dict[str, Any]:
        trained = {name: one._replace(title="", twin=None)._asdict() for name, one in INGREDIENTS.items()}
        constants = [trained, TOTAL_LENGTH, TEMPLATES]
        asked = [asdict(item) for probe in (Counting, Sums) for item in self.asked(probe)]
        return identify(self.options) | {"dtype": DTYPE, "made_of": fingerprint(constants), "asked": fingerprint(asked)}

    def items(self) -> list[Trained]:
        return [
            Trained(ingredient, seed) for seed in range(self.options.seeds) for ingredient in self.options.ingredients
        ]

    def measure_trained(self, item: Trained, recipe: Recipe) -> Record:
        model = self.load(item)
        # One anchor for all, even with tables: the first token lasts one unit, so no position is below 0.
        reader = Reader(ContinuousLM(model, "end"), AutoTokenizer.from_pretrained(recipe.output))
        probed = {probe.name(): self.probed(probe, reader) for probe in (Counting, Sums)}
        return {"parameters": model.num_parameters(), **probed}

    def asked(self, probe: type[Probe]) -> list[Item]:
        """Returns the first records of a probe's data set."""
        items = probe.prompts(replace(NO_MODELS, limit=self.options.records))
        return [item for item in items if item.group == SET]

    def probed(self, probe: type[Probe], reader: Reader) -> dict[str, Any]:
        """Returns the summary of a probe."""
        summary = probe.summary([reader.record(item) for item in self.asked(probe)])
        if probe is Sums:
            summary["right"] = summary["valid"] / summary["records"]
        return summary

    def load(self, item: Trained) -> Any:
        """Loads a trained model."""
        return place(CLASSES[INGREDIENTS[item.ingredient].model].from_pretrained(self.recipe(item).output))

    @cached_property
    def inputs(self) -> Path:
        """Returns the folder of the tokenizer, the questions and the models that training starts from."""
        made_with = {name: value for name, value in self.settings().items() if name not in ("records", "asked")}
        folder = inputs_folder(self.output, made_with)

        def write(tokenizer: Path) -> None:
            counts = [replace(NO_MODELS, template=template) for template in TEMPLATES]
            items = [*(item for asked in counts for item in Counting.prompts(asked)), *Sums.prompts(NO_MODELS)]
            questions_tokenizer(item.text for item in items).save_pretrained(tokenizer)

        make_once(folder / "tokenizer", write)
        return folder

    def questions(self, seed: int) -> Path:
        """Writes a file of questions that alternately count words and add. With one seed, all models get the same."""

        def write(folder: Path) -> None:
            counting, adding = CountingQuestions(random.Random(seed)), Adding(random.Random(seed))
            with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
                for number in range(self.options.questions):
                    question = adding.question() if number % 2 else counting.words_question(TEMPLATES)
                    file.write(json.dumps(question) + "\n")

        return make_once(self.inputs / f"questions-{seed}", write) / "train.jsonl"

    def start(self, item: Trained) -> Path:
        """Writes a checkpoint with random weights. With one seed, all models of equal depth get the same."""
        ingredient = INGREDIENTS[item.ingredient]
        has_rotary = ingredient.model != "positions"

        def write(folder: Path) -> None:
            tokenizer = AutoTokenizer.from_pretrained(self.inputs / "tokenizer")
            model: Any = small_llama(tokenizer, item.seed, self.options.width, ingredient.layers)
            if not has_rotary:
                model = without_rotary(model, TOTAL_LENGTH if ingredient.learned_positions else None)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        name = f"llama-{ingredient.layers}" if has_rotary else item.ingredient
        return make_once(self.inputs / f"start-{name}-{item.seed}", write)

    def recipe(self, item: Trained) -> Recipe:
        """Returns a model's recipe. `condense train` could also run it, except without rotary positions."""
        options, ingredient = self.options, INGREDIENTS[item.ingredient]
        steps = round(options.steps * ingredient.steps)
        model: dict[str, Any] = {"source": str(self.start(item)), "kind": ingredient.model}
        if ingredient.model == "condense":
            model |= {"segment_length": options.segment_length, **PAPERS_MEMORY}
        fields: dict[str, Any] = {}
        if ingredient.jitter is not None:
            fields["objective"] = {"kind": "duration_jitter", "jitter": ingredient.jitter}
        sources = [{"files": str(self.questions(item.seed)), "text": "prompt", "summary": "answer"}]
        return study_recipe(
            model=model,
            data={"task": "questions", "sources": sources, "prepared": self.output / "prepared"},
            output=self.output / "models" / item.folder,
            stage=(TOTAL_LENGTH, steps),
            batch=options.batch,
            optimizer=anneal(options.learning_rate, steps),
            evaluation={"every": max(1, steps // 8), "sequences": 128},
            seed=item.seed,
            **fields,
        )

    def summarise(self, measured: Sequence[tuple[Trained, Record]]) -> dict[str, Any]:
        """Returns `models`, each with the figures of both probes, and `more`, the differences to the twin of its seed.
        A figure is None for a model that does not answer; figures of sums are None if no sum is right."""
        figures = {item: _figures(record) for item, record in measured}
        models = []
        for item, record in measured:
            twin = INGREDIENTS[item.ingredient].twin
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
        """Returns tables by ingredient: the figures of its models, and their differences to the twins."""
        rows, differences = [], []
        for ingredient in results["ingredients"]:
            models, (name, twin, *_) = select(results["models"], ingredient=ingredient), INGREDIENTS[ingredient]
            found = {figure: [model["figures"][figure] for model in models] for figure in FIGURES}
            cells = [format_mean(mean_and_interval(values, *bounds(figure))) for figure, values in found.items()]
            rows.append([name, f"{models[0]['parameters']:,}", *cells])
            if twin is not None:
                cells = [
                    format_mean(mean_and_interval([model["more"][figure] for model in models])) for figure in FRACTIONS
                ]
                differences.append([name, INGREDIENTS[twin].title, *cells])
        tables = [Table("how they read fractions", ["model", "parameters", *FIGURES], rows)]
        if differences:
            tables.append(Table("more than the twin of the same seed", ["model", "twin", *FRACTIONS], differences))
        return tables

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws each figure of each model, with its mean and interval over seeds."""
        names = [INGREDIENTS[ingredient].title for ingredient in results["ingredients"]]
        with picture(path, columns=len(FRACTIONS), figsize=(16, 4), sharey=True) as panels:
            for panel, figure in zip(panels, FRACTIONS, strict=True):
                for row, ingredient in enumerate(results["ingredients"]):
                    values = [model["figures"][figure] for model in select(results["models"], ingredient=ingredient)]
                    known = [value for value in values if value is not None]
                    found = mean_and_interval(values, *bounds(figure))
                    panel.plot(known, [row] * len(known), ".", color="0.6")
                    if found["mean"] is not None:
                        panel.plot(found["mean"], row, "o", color="tab:blue")
                    if found["low"] is not None:
                        panel.plot([found["low"], found["high"]], [row, row], "-", color="tab:blue")
                panel.set_xlabel(textwrap.fill(figure, 26))
                panel.grid(alpha=0.3)
            panels[0].set_yticks(range(len(names)), names)
            panels[0].invert_yaxis()


def shown_by(kind: str) -> type[Ingredients]:
    """Returns the object with the tables of a result."""
    return Ingredients


def _figures(record: Record) -> dict[str, float | None]:
    return {
        name: record[probe][field] if name in WHOLE or answers(record[probe]) else None
        for name, (probe, field) in FIGURES.items()
    }


def bounds(figure: str) -> tuple[float, float]:
    """Returns the bounds of a figure: all but two are shares."""
    return 0, math.inf if figure in ABOVE_ONE else 1


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other
