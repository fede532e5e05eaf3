"""Checks of a run that take seconds and write nothing, before ranks start or documents are prepared."""

from pathlib import Path
from typing import Any

from condense.files import check_output_folder

from .checkpoints.resume import find_checkpoint
from .data.documents import source_files
from .recipe import DocumentData, Recipe


def check_run(recipe: Recipe, ranks: int, deepspeed: dict[str, Any] | None) -> None:
    """Raises `ValueError` in one sentence for a run of `ranks` ranks that could not begin.

    `deepspeed` is the content of the DeepSpeed configuration, None without the launcher. Of the model's weights only
    names and shapes are read.
    """
    recipe.accumulation(ranks)
    check_output_folder(recipe.output)
    check_prepared(recipe)
    config = recipe.model.load_config()
    if deepspeed and deepspeed["zero_optimization"]["stage"] == 3:
        check_zero_3(recipe, config.vocab_size)
    recipe.model.load_tokenizer(config)
    recipe.model.load(recipe.attention, recipe.attention_dropout, device_map="meta")
    find_checkpoint(recipe)


def check_prepared(recipe: Recipe) -> None:
    """Raises `ValueError` for documents that do not exist, and for a folder that can't keep them prepared."""
    if not isinstance(recipe.data, DocumentData):
        return
    for source in (*recipe.data.sources, *(recipe.evaluation.sources if recipe.evaluation else ())):
        if source.files is not None:
            source_files(source)
    check_output_folder(Path(recipe.data.prepared))


def check_zero_3(recipe: Recipe, vocab_size: int) -> None:
    """Raises `ValueError` for a run in which ranks would use the weights unequally often."""
    if recipe.curriculum:
        raise ValueError("a curriculum gives ranks texts of unequal lengths, which ZeRO-3 can't run: use ZeRO-2.")
    assert recipe.stages is not None
    tokens = recipe.micro_batch * max(stage.total_length for stage in recipe.stages)
    equal_lengths = recipe.data.task == "text" and recipe.data.fit == "cut"
    recipe.model.check_zero_3(tokens, vocab_size, equal_lengths)
