"""`condense study ingredients`: models that differ from a twin in one thing, tested by the continuity experiments."""

from functools import partial

from ..command import command, run_study
from .options import IngredientOptions

ingredients = command(
    IngredientOptions,
    partial(run_study, "condense.eval.ingredients.study:Ingredients"),
    "study ingredients",
    extras=["train"],
)
