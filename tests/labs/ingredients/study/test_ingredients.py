"""The study with the real trainer on tiny models: what is alike between twins, and what is measured."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.eval.runner import run
from condense.labs.continuity.model import ContinuousLM
from condense.labs.continuity.study import probes
from condense.labs.continuity.study.engine import Reader
from condense.labs.continuity.study.options import ProbeOptions
from condense.labs.ingredients.study.options import INGREDIENTS, IngredientOptions
from condense.labs.ingredients.study.positions import PositionsForCausalLM
from condense.labs.ingredients.study.study import FIGURES, FRACTIONS, WHOLE, Ingredients, Trained
from tests.eval.studies import run_study, stored_tables

SMALL = {"records": 2, "questions": 200, "segment_length": 8, "width": 16, "batch": 4, "steps": 8, "seeds": 1}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    output = tmp_path_factory.mktemp("ingredients")
    task = Ingredients(IngredientOptions(**SMALL), output)
    with pytest.MonkeyPatch.context() as patch:
        # A model of a few steps answers anything: its figures count here all the same.
        patch.setattr("condense.labs.ingredients.study.study.answers", lambda found: True)
        return task, output, run_study(task, output)


def flattened(value, name=""):
    """Returns the values of nested dictionaries and lists by their path."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield name, value
        return
    for key, part in parts:
        yield from flattened(part, f"{name}.{key}" if name else str(key))


def changed(one, other):
    return {field for field in one.keys() | other.keys() if one.get(field) != other.get(field)}


def recipes(compared):
    return {ingredient: compared[0].recipe(Trained(ingredient, 0)) for ingredient in INGREDIENTS}


def test_twins_differ_in_one_thing(compared):
    found = {name: recipe.model_dump(mode="json", exclude={"output"}) for name, recipe in recipes(compared).items()}
    flat = {name: dict(flattened(recipe)) for name, recipe in found.items()}
    different = {name: changed(flat[name], flat[twin]) for name, one in INGREDIENTS.items() if (twin := one.twin)}
    assert different.pop("jitter") == {"objective.kind", "objective.jitter"}
    by_steps = {"stages.0.steps", "optimizer.warmup_steps", "evaluation.every", "checkpoints.every", "log_every"}
    assert "stages.0.steps" in different["quarter"] & different["fourfold"]
    assert different.pop("quarter") <= by_steps and different.pop("fourfold") <= by_steps
    for name in ("learned", "no_positions"):
        assert different[name] == {"model.source", "model.kind"}
    assert different["one_layer"] == different["four_layers"] == {"model.source"}
    assert "model.source" not in different["folded"]
    assert all(field.startswith("model.") for field in different["folded"])
    starts = {name: Path(recipe["model"]["source"]) for name, recipe in found.items()}
    configs = {name: json.loads((start / "config.json").read_text()) for name, start in starts.items()}
    for name, fields in {
        "one_layer": {"num_hidden_layers"},
        "four_layers": {"num_hidden_layers"},
        "no_positions": {"architectures", "learned_positions", "model_type"},
        "learned": {"architectures", "learned_positions", "max_position_embeddings", "model_type"},
    }.items():
        assert changed(configs[name], configs["rotary"]) == fields
    assert [found[name]["stages"][0]["steps"] for name in ("rotary", "quarter", "fourfold")] == [8, 2, 32]
    folded, rotary = found["folded"]["model"], found["rotary"]["model"]
    assert folded["source"] == rotary["source"] and folded["segment_length"] == 8 and rotary["kind"] == "stock"


def test_first_weights_are_alike(compared):
    starts = {name: load_file(f"{recipe.model.source}/model.safetensors") for name, recipe in recipes(compared).items()}
    for name in ("learned", "no_positions"):
        assert set(starts[name]) - set(starts["rotary"]) == ({"model.wpe.weight"} if name == "learned" else set())
        assert all(torch.equal(starts[name][weight], value) for weight, value in starts["rotary"].items())
    for name, number in {"one_layer": 1, "rotary": 2, "four_layers": 4, "folded": 2}.items():
        assert len({weight.split(".")[2] for weight in starts[name] if ".layers." in weight}) == number


def test_models_are_of_their_kind(compared):
    task, _, results = compared
    models = {name: task.load(Trained(name, 0)) for name in INGREDIENTS}
    assert {name for name, model in models.items() if isinstance(model, CondenseForCausalLM)} == {"folded", "jitter"}
    with_positions = {name for name, model in models.items() if isinstance(model, PositionsForCausalLM)}
    assert with_positions == {"learned", "no_positions"}
    sizes = {name: model.num_parameters() for name, model in models.items()}
    assert {model["ingredient"]: model["parameters"] for model in results["models"]} == sizes
    jittered, folded = (dict(models[name].named_parameters()) for name in ("jitter", "folded"))
    assert any(not torch.equal(weight, folded[name]) for name, weight in jittered.items())


@pytest.mark.parametrize("ingredient", ["learned", "folded"])
def test_figures_are_those_of_the_probes(compared, ingredient):
    """Compares with the probes' own run on the trained model."""
    task, _, results = compared
    found = next(model for model in results["models"] if model["ingredient"] == ingredient)
    lm = ContinuousLM(task.load(Trained(ingredient, 0)), "end")
    reader = Reader(lm, AutoTokenizer.from_pretrained(task.recipe(Trained(ingredient, 0)).output))
    for name in ("counting", "sums"):
        probe = probes.PROBES[name]
        items = [item for item in probe.prompts(ProbeOptions(models=[], limit=2)) if item.group == "set"]
        assert len(items) == 2
        summary = probe.summary([reader.record(item) for item in items])
        assert {field: found[name][field] for field in summary} == summary


def test_differences_from_the_twin(compared):
    _, _, results = compared
    figures = {model["ingredient"]: model["figures"] for model in results["models"]}
    for model in results["models"]:
        twin = INGREDIENTS[model["ingredient"]].twin
        if twin is None:
            assert model["more"] is None
            continue
        for name in FIGURES:
            values = figures[model["ingredient"]][name], figures[twin][name]
            expected = None if None in values else pytest.approx(values[0] - values[1])
            assert model["more"][name] == expected


@pytest.mark.usefixtures("without_pictures", "nothing_is_trained")
def test_files(compared, monkeypatch):
    task, output, results = compared
    assert [len(table.rows) for table in stored_tables(Ingredients, output)] == [len(INGREDIENTS), len(INGREDIENTS) - 1]
    lines = csv.DictReader((output / "ingredients.csv").open())
    assert [line["ingredient"] for line in lines] == list(INGREDIENTS)
    monkeypatch.setattr("condense.labs.ingredients.study.study.answers", lambda found: True)
    assert run(Ingredients(task.options, output), output)["models"] == results["models"]


@pytest.mark.usefixtures("nothing_is_trained")
def test_a_model_that_does_not_answer_has_no_figures(compared, monkeypatch):
    task, output, _ = compared
    monkeypatch.setattr("condense.labs.ingredients.study.study.answers", lambda found: False)
    found = run(Ingredients(task.options, output), output)
    for model in found["models"]:
        assert all((value is None) == (name in FRACTIONS) for name, value in model["figures"].items())
    figures, more = Ingredients.tables(found)
    assert all(row[2 + len(WHOLE) :] == ["-"] * len(FRACTIONS) for row in figures.rows)
    assert all(row[2:] == ["-"] * len(FRACTIONS) for row in more.rows)


def test_questions(compared):
    """To count and to add by turns; every word known, and no text longer than a text in training."""
    task, _, _ = compared
    questions = [json.loads(line) for line in task.questions(0).read_text().splitlines()]
    assert len(questions) == 200
    assert all(("How many" in q["prompt"] or "how many" in q["prompt"]) and '"' in q["prompt"] for q in questions[::2])
    assert all('"' not in question["prompt"] for question in questions[1::2])
    tokenizer = AutoTokenizer.from_pretrained(task.inputs / "tokenizer")
    encoded = tokenizer([f"{question['prompt']} {question['answer']}" for question in questions])["input_ids"]
    assert all(tokenizer.unk_token_id not in ids for ids in encoded)
    assert max(map(len, encoded)) < task.recipe(Trained("rotary", 0)).stages[0].total_length


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ingredients": ("rotary", "magic")}, r"\['magic'\] are not known: choose from rotary"),
        ({"ingredients": ("folded", "folded")}, "names folded twice"),
        ({"ingredients": ("rotary", "jitter")}, "jitter is compared with its twin folded: add folded"),
        ({"steps": 10}, "steps=10: one model has a quarter of them; pass a multiple of four"),
        ({"segment_length": 21}, "segment_length=21: a text has up to 40 tokens.*pass 20 or less"),
        ({"learning_rate": 0}, "a learning rate of 0"),
        ({"width": 20}, "width=20: four heads of an even size need a multiple of 8"),
    ],
)
def test_refusals(changed, message):
    with pytest.raises(ValueError, match=message):
        IngredientOptions(**{**SMALL, **changed})
