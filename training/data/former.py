"""Refuses folders of documents that former versions prepared with other tokens.

A preparation resumes where it was stopped, so such a folder could otherwise hold documents of both kinds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from condense.text import first_tokens, template_tokens

from ..recipe import Source
from .shards import source_files

UNMERGED = "unmerged"  # the folder of chunks that worker processes have written, until they are merged into parts
LINE_ENDS = ".line_ends"  # in a folder whose text files were read by `decode_text`


def changed_frame(tokenizer: Any, task: str | None) -> list[list[int]]:
    """Returns the tokens around each text if former versions put others there; otherwise an empty list.

    They began documents with `bos_token`, and questions with the tokens of the tokenizer's template. They took tokens
    that the template puts after a question for a part of its prompt.
    """
    before, behind = template_tokens(tokenizer)
    former = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if task == "questions":
        former = before
    else:
        behind = []
    now = first_tokens(tokenizer)
    return [] if now == former and not behind else [now, behind]


def check_no_former(folder: Path, why: str) -> None:
    """Raises `ValueError` if `folder`, a former version's, holds prepared documents."""
    if _holds_documents(folder):
        raise ValueError(
            f"{folder} holds documents that a former version has prepared in another way: {why}. Delete the folder, "
            "and the checkpoints of a run with its documents, to prepare them again; or finish that run with the "
            "version it began with."
        )


def check_line_ends(folder: Path, sources: Sequence[Source]) -> None:
    """Raises `ValueError` if a former version kept carriage returns or byte order marks in the documents of `folder`.

    Reads the text files of the sources, and only for a folder of a former version.
    """
    marker = folder / LINE_ENDS
    paths = [path for source in sources if source.files is not None for path in source_files(source)]
    texts = [path for path in paths if path.suffix == ".txt"]
    if not texts or marker.exists():
        return
    if _holds_documents(folder):
        for path in texts:
            if (data := path.read_bytes()).startswith(b"\xef\xbb\xbf") or b"\r" in data:
                check_no_former(folder, f"with the byte order mark or the carriage returns of {path}")
    marker.touch()


def _holds_documents(folder: Path) -> bool:
    return any(folder.glob("part-*.arrow")) or (folder / UNMERGED).exists()
