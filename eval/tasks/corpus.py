"""Documents with their summaries, read once for all models of an evaluation.

As in training, a list of sentences is joined by spaces, and the first of several summaries is the reference.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from condense.training.data.documents import Document, good_documents, read_documents
from condense.training.data.shards import Problem, source_files
from condense.training.data.summarization import prompt_frame, prompt_ids
from condense.training.recipe import Source
from condense.utils.progress import ProgressBar

from .options import BadDocuments
from .rouge import Rouge

DATA_SETS = {
    "cnn_dailymail": Source(
        hub="abisee/cnn_dailymail", name="3.0.0", split="test", text="article", summary="highlights"
    ),
    "booksum": Source(hub="kmfoda/booksum", split="test", text="chapter", summary="summary_text"),
}
NAMES = (*DATA_SETS, "scitldr")


class Corpus(NamedTuple):
    """Documents, shortest first; `num_tokens` counts a document without the prompt's frame."""

    documents: list[Document]
    num_tokens: list[int]
    left_out: dict[str, int]  # counts by reason

    @property
    def fingerprint(self) -> str:
        texts = [[document.text, document.summary] for document in self.documents]
        return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def find_source(data: str, text_field: str | None = None, summary_field: str | None = None) -> Source:
    """Returns the test split of a known data set, or local files by name or glob pattern (.jsonl, .parquet).

    Raises `ValueError` if `data` is neither, or if fields are given for a known data set, which has its own.
    """
    if data not in NAMES:
        source = Source(files=data, text=text_field or "text", summary=summary_field or "summary")
        try:
            source_files(source)
        except ValueError as error:
            raise ValueError(f"{error} Pass a .jsonl or .parquet file, or one of {', '.join(NAMES)}.") from error
        return source
    if text_field or summary_field:
        raise ValueError(
            f"{data} has its own fields for text and summary: leave {text_field or summary_field!r} out, "
            "or pass a file of your own."
        )
    if data in DATA_SETS:
        return DATA_SETS[data]
    # SciTLDR is on the hub as a script, which `datasets` no longer runs, and as a Parquet copy.
    from huggingface_hub import hf_hub_download

    file = hf_hub_download(
        "allenai/scitldr", "Abstract/test/0000.parquet", repo_type="dataset", revision="refs/convert/parquet"
    )
    return Source(files=file, text="source", summary="target")


def read_corpus(
    source: Source,
    tokenizer: Any,
    num_documents: int | None = None,
    longest: int | None = None,
    bad_documents: BadDocuments = "refuse",
) -> Corpus:
    """Reads the first `num_documents` readable documents (None: all), except prompts of over `longest` tokens.

    Raises `ValueError` for the first broken document, unless they are to be skipped, or if none is left.
    """
    num_frame, left_out = sum(map(len, prompt_frame(tokenizer))), Counter[str]()
    found = list[tuple[int, Document]]()
    read = ProgressBar(read_documents([source], with_summaries=True), desc="reading documents", unit=" documents")
    documents = good_documents(
        _with_words(read), bad_documents, lambda problem: left_out.update([problem.kind]), "--bad-documents skip"
    )
    for document in islice(documents, num_documents):
        num_tokens = len(prompt_ids(tokenizer, document.text))
        if longest is not None and num_tokens > longest:
            left_out[f"prompt over {longest:,} tokens"] += 1
        else:
            found.append((num_tokens - num_frame, document))
    if not found:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items()) or "it is empty"
        raise ValueError(f"{source.files or source.hub} has no document to summarise ({why}).")
    found.sort(key=lambda pair: pair[0])  # stable: documents of one length keep their order
    return Corpus([document for _, document in found], [tokens for tokens, _ in found], dict(left_out))


def _with_words(documents: Iterable[Document | Problem]) -> Iterator[Document | Problem]:
    """Yields the documents; a summary without words for ROUGE becomes a problem."""
    rouge = Rouge()
    for document in documents:
        if isinstance(document, Document) and not rouge.has_words(document.summary):
            detail = repr(document.summary[:60])
            yield Problem(document.where, "summary without words of a-z and 0-9", detail)
        else:
            yield document
