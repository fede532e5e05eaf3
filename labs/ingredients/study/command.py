"""`condense study ingredients`: models that differ from a twin in one thing, tested by the continuity experiments."""

from functools import partial

from condense.eval.command import command, run_study

from .options import IngredientOptions

ingredients = command(
    IngredientOptions,
    partial(run_study, "condense.labs.ingredients.study.study:Ingredients"),
    "study ingredients",
    extras=["train"],
)
