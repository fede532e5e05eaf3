"""Recipes are checked before anything runs."""

from pathlib import Path

import pytest

from training.recipe import Recipe, load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "training" / "recipes"
LINES = "model: m\noutput: o\nsteps: 60\ntokens_per_step: 4096\n"


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        (tmp_path / "recipe.yaml").write_text(text)
        return tmp_path / "recipe.yaml"

    return write


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path):
    assert isinstance(load_recipe(path), Recipe)


def test_overrides(recipe):
    path = recipe(LINES)
    changed = load_recipe(path, ["steps=70", "optimizer.learning_rate=1e-4", "curriculum.review=0.5", "dtype=float32"])
    assert (changed.steps, changed.optimizer.learning_rate) == (70, 1e-4)
    assert (changed.curriculum.review, changed.dtype) == (0.5, "float32")


@pytest.mark.parametrize(
    ("lines", "overrides", "words"),
    [
        (LINES + "stepz: 3\n", [], "stepz is no key.*'steps'"),
        (LINES, ["optimizer.learning_rat=1"], "optimizer.learning_rat is no key.*'learning_rate'"),
        (LINES, ["steps=0"], "steps=0.*greater than or equal to 1"),
        (LINES, ["steps"], "'steps' is no override: write key=value"),
        (LINES, ["dtype=float16"], "dtype='float16'.*'bfloat16' or 'float32'"),
        (LINES, ["curriculum.last_segments=1"], "last_segments=1 is below first_segments=2"),
        ("steps: 3\n", [], "model"),
        (LINES, ["steps.x=1"], "'steps.x=1': steps holds no keys"),
        ("- steps\n", ["steps=1"], "the recipe holds no keys"),
        (
            LINES,
            ["optimizer.decay_steps=100"],
            "warmup_steps=50 and optimizer.decay_steps=100 do not fit into steps=60",
        ),
        (LINES, ["save_every=25"], "save_every=25 is no multiple of log_every=10"),
        (LINES, ["curriculum.patience=15"], "curriculum.patience=15 is no multiple of log_every=10"),
    ],
)
def test_mistakes_are_named(recipe, lines, overrides, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_recipe(recipe(lines), overrides)


def test_a_missing_recipe_is_named():
    with pytest.raises(ValueError, match="nowhere.yaml"):
        load_recipe(Path("nowhere.yaml"))
