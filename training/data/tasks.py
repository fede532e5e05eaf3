"""The examples of a recipe: to train on and to validate with."""

import os
from collections.abc import Sequence

from ..recipe import DigitsData, DocumentData, GeneratedData, Recipe, SampleData, Stage
from .continued import Lot, continue_run, plans, sequences_asked
from .digits import DigitExamples, split
from .document_task import DocumentTask
from .examples import Examples
from .generated import GeneratedExamples, make_generated_task
from .samples import sample_store
from .text import TextExamples

VALIDATION_SEED = 2**40  # added to the run's seed: validation has other generated texts than training


def make_examples(
    recipe: Recipe, tokenizer, num_workers: int = 0, former: Sequence[Sequence[Stage]] = ()
) -> tuple[Examples, Examples | None]:
    """Returns the examples to train on and, if the recipe has an evaluation, others to validate with.

    Prepares documents first, in `num_workers` processes; 0 prepares in this one. `former` are the stages that a resumed
    run had before its recipe's, oldest first: its documents keep their order.
    """
    if isinstance(recipe.data, GeneratedData):
        task = make_generated_task(recipe.data, tokenizer)
        training = GeneratedExamples(task, recipe.data, recipe.seed)
        held_out = GeneratedExamples(task, recipe.data, recipe.seed + VALIDATION_SEED)
        for stage in recipe.stages or ():  # refuses a length that is too short, before anything is trained
            training.sequence(0, stage.total_length)
        return training, held_out if recipe.evaluation else None
    if isinstance(recipe.data, DigitsData):
        numbers, others = split()
        return DigitExamples(numbers, recipe.seed), DigitExamples(others, None) if recipe.evaluation else None
    if isinstance(recipe.data, SampleData):
        return sampled_examples(recipe, recipe.data, tokenizer, former)
    assert isinstance(recipe.data, DocumentData)
    documents = DocumentTask(recipe, recipe.data, tokenizer, num_workers, former)
    found = documents.examples()
    if os.environ.get("RANK", "0") == "0":
        print(*documents.description(found), sep="\n", flush=True)
    return found.training, found.held_out


def sampled_examples(
    recipe: Recipe, data: SampleData, tokenizer, former: Sequence[Sequence[Stage]]
) -> tuple[Examples, Examples | None]:
    """Returns the model's own texts; the first ones are held out for the evaluation."""
    parts = plans(recipe, former)
    lasts, num_held_out = [part.num_samples() for part in parts], recipe.num_held_out
    store = sample_store(data, recipe.model.source, tokenizer, recipe.longest_text(), max(lasts))
    training = continue_run(
        lambda first, last: TextExamples(store, first, last, "cut", recipe.seed),
        num_held_out,
        [Lot(sequences_asked(part), last) for part, last in zip(parts, lasts, strict=True)],
    )
    return training, TextExamples(store, 0, num_held_out, "cut", None) if num_held_out else None
