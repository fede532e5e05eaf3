"""The policy for documents that cannot be read: refuse them, or skip and count them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from training.data.documents import Document, Problem

from .options import BadDocuments


def readable(
    documents: Iterable[Document | Problem],
    bad_documents: BadDocuments = "refuse",
    skipped: Counter[str] | None = None,
    remedy: str = "",
) -> Iterator[Document]:
    """The documents without the problems, which are counted by kind in `skipped`.

    Raises `ValueError` for the first problem unless problems are to be skipped; `remedy` says how to skip them.
    """
    for document in documents:
        if isinstance(document, Document):
            yield document
        elif bad_documents == "refuse":
            raise ValueError(
                f"{document.where}: {document.kind} ({document.detail}). Mend it, or leave such documents out{remedy}."
            )
        elif skipped is not None:
            skipped[document.kind] += 1
