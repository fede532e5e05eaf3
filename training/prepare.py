"""Tokenises documents before a run, so training finds them and starts at once."""

import os

from .data.tasks import make_examples
from .preflight import check_former_recipe, check_prepared, check_samples
from .recipe import DocumentData, Recipe, SampleData


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(recipe: Recipe, num_workers: int) -> None:
    """Prepares all documents that a recipe reads, including its evaluation's, in `num_workers` processes.

    Texts that a model samples from itself are drawn in this process. A stopped preparation resumes. Raises `ValueError`
    if documents can't be read, or are too few.
    """
    if not isinstance(recipe.data, (DocumentData, SampleData)):
        print(f"data.task={recipe.data.task} makes its texts in training: there is nothing to prepare", flush=True)
        return
    check_former_recipe(recipe.model.source)
    check_prepared(recipe)
    config = recipe.model.load_config()
    tokenizer = recipe.model.load_tokenizer(config)
    check_samples(recipe, config, tokenizer)
    make_examples(recipe, tokenizer, num_workers)
