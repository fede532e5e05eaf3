"""Overrides of the command line."""

import re
from pathlib import Path

import pytest

from condense.training.recipe import load_recipe

RECIPE = """
model: {source: m, segment_length: 64}
output: o
data: {task: passkey}
stages: [{total_length: 64, steps: 20}]
global_batch: 8
optimizer: {warmup_steps: 10}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_another_model_keeps_the_keys_beside_its_source(path):
    model = load_recipe(path, ["model=other", "model.schedule=sequential"]).model
    assert (model.kind, model.source, model.segment_length, model.schedule) == ("condense", "other", 64, "sequential")
    assert load_recipe(path, ["model={kind: stock, source: other}"]).model.model_dump() == {
        "kind": "stock",
        "source": "other",
    }


def test_a_text_stands_for_the_source(path):
    path.write_text(RECIPE.replace("{source: m, segment_length: 64}", "m"))
    assert load_recipe(path).model.source == "m"
    assert load_recipe(path, ["model.segment_length=32"]).model.segment_length == 32
    assert load_recipe(path, ["model.kind=stock"]).model.kind == "stock"


def test_the_example_for_own_documents(tmp_path):
    """As docs/training.md has it."""
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "mine.yaml", ["steps=1500"])
    assert recipe.steps == 1500 and recipe.data.sources[0].files == "train.jsonl"
