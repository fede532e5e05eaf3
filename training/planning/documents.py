"""Counts what a run will read of each source: exactly if its documents are prepared, or else by its files' sizes."""

from collections.abc import Sequence
from typing import Any

from ..data.document_task import DocumentTask, NotPrepared
from ..data.shards import source_files
from ..recipe import DocumentData, Recipe, Source

BYTES_PER_TOKEN = 4  # of a file that is not prepared: an assumption


def planned_documents(recipe: Recipe, config: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a row of figures for each source of documents, and lines about them; nothing for other tasks."""
    if not isinstance(recipe.data, DocumentData):
        return [], []
    rows = [_describe_unprepared(source) for source in recipe.data.sources]
    unprepared = rows, _unprepared_in_words(rows, recipe.data.max_documents)
    if any("error" in row for row in rows):
        return unprepared
    try:
        tokenizer = recipe.model.load_tokenizer(config)
    except ValueError:  # nothing has been prepared for a model without one
        return unprepared
    documents = DocumentTask(recipe, recipe.data, tokenizer, only_prepared=True)
    try:
        found = documents.examples()
    except NotPrepared:
        return unprepared
    return [one._asdict() for one in documents.reading(found)], documents.description(found)


def _describe_unprepared(source: Source) -> dict[str, Any]:
    if source.files is None:
        return {"source": source.label}
    try:
        files = source_files(source)
    except ValueError as error:
        return {"source": source.label, "error": str(error)}
    size = sum(path.stat().st_size for path in files)
    return {"source": source.label, "files": len(files), "bytes": size, "assumed_tokens": size // BYTES_PER_TOKEN}


def _unprepared_in_words(rows: Sequence[dict[str, Any]], max_documents: int | None) -> list[str]:
    lines = ["documents, not prepared (`condense prepare` counts their tokens):"]
    total = sum(row.get("bytes", 0) for row in rows)
    of_files = "" if max_documents is None else f"the first {max_documents:,} documents of "
    for row in rows:
        if "error" in row:
            lines.append(f"  {row['error']}")
        elif "files" not in row:
            lines.append(f"  {row['source']}: the first documents, as many as the steps need")
        else:
            share = f"about {row['bytes'] / total:.1%} of the run, " if all("files" in one for one in rows) else ""
            lines.append(
                f"  {row['source']}: {share}from {of_files}{row['files']:,} files with {row['bytes'] / 1e6:,.1f} MB, "
                f"about {row['assumed_tokens']:,} tokens if one has {BYTES_PER_TOKEN} bytes, an assumption"
            )
    return lines
