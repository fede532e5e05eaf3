"""Hashes of the files that a recipe names: a run resumes if they were moved, but not if they were changed.

A file is identified by its size and a hash of all its bytes, which takes about a second for a gigabyte.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from ..data.shards import source_files
from ..recipe import Recipe

MODEL_FILES = ("config.json", "tokenizer*", "*.safetensors", "*.bin")

Contents = dict[str, list[list[str] | None]]


def contents(recipe: Recipe) -> Contents:
    """Hashes the files of `data.sources`, `model.source` and `objective.teacher`; None for the hub's."""
    found: Contents = {}
    if sources := getattr(recipe.data, "sources", []):  # some tasks have none
        found["data.sources"] = [
            None if source.files is None else [content(path) for path in source_files(source)] for source in sources
        ]
    models = {"model.source": recipe.model.source, "objective.teacher": getattr(recipe.objective, "teacher", None)}
    for name, source in models.items():
        if source:  # models with random weights have none
            found[name] = [model_contents(Path(source))]
    return found


def model_contents(source: Path) -> list[str] | None:
    if source.is_file():  # GGUF
        return [content(source)]
    return contents_of(str(source), MODEL_FILES) if source.is_dir() else None


def contents_of(folder: str, patterns: Sequence[str]) -> list[str]:
    """Returns name, size and hash of the files in a folder that match a pattern."""
    files = sorted(chain.from_iterable(map(Path(folder).glob, patterns)))
    return [f"{path.name} {content(path)}" for path in files]


def content(path: Path) -> str:
    """Returns the size and hash of a file's content."""
    stat = path.stat()
    return _content(path.resolve(), stat.st_size, stat.st_ctime_ns)


@cache
def _content(path: Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return f"{path.suffix} {size} {hashlib.file_digest(file, 'sha256').hexdigest()}"
