"""What can be refused before ranks start, or before they prepare documents: in seconds, and with nothing written."""

from pathlib import Path
from typing import Any

from condense.files import check_output_folder

from .batches import check_zero_3
from .data.documents import source_files
from .models import load_config, load_model, load_tokenizer
from .recipe import DocumentData, Recipe
from .resume import find_checkpoint


def check_run(recipe: Recipe, ranks: int, settings: dict[str, Any] | None) -> None:
    """Raises `ValueError` in one sentence for a run of `ranks` ranks that could not begin.

    `settings` are the DeepSpeed configuration's, None without the launcher. Of the model the names and shapes of the
    weights are read, not the weights.
    """
    recipe.accumulation(ranks)
    check_output_folder(recipe.output)
    check_prepared(recipe)
    config = load_config(recipe)
    if settings and settings["zero_optimization"]["stage"] == 3:
        check_zero_3(recipe, config.vocab_size)
    load_tokenizer(recipe, config)
    load_model(recipe, device_map="meta")
    find_checkpoint(recipe)


def check_prepared(recipe: Recipe) -> None:
    """Raises `ValueError` for documents that are not there, and for a folder that can't keep them prepared."""
    if not isinstance(recipe.data, DocumentData):
        return
    for source in (*recipe.data.sources, *(recipe.evaluation.sources if recipe.evaluation else ())):
        if source.files is not None:
            source_files(source)
    check_output_folder(Path(recipe.data.prepared))
