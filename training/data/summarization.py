"""Documents, each followed by a summary to predict (appendix D of the paper)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from condense.utils.text import first_tokens

from .documents import Document
from .store import Tokens

BEFORE = "Summarize this text:\n"
AFTER = "\n----\nSummary:\n"


def _ids(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def prompt_frame(tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after a document's tokens; the summary follows."""
    before, behind = _ids(tokenizer, [BEFORE, AFTER])
    return first_tokens(tokenizer) + before, behind


def prompt_text(document: str) -> str:
    """Returns the prompt for a summary of a document."""
    return f"{BEFORE}{document}{AFTER}"


def prompt_ids(tokenizer, document: str) -> list[int]:
    """Returns the prompt for a summary of a document: the same tokens as in training."""
    before, behind = prompt_frame(tokenizer)
    return [*before, *_ids(tokenizer, [document])[0], *behind]


def summary_encoder(tokenizer, total_length: int, too_long: Literal["drop", "cut"]):
    """Returns an encoder of documents with their summaries, at most `total_length` tokens."""
    if tokenizer.eos_token_id is None:
        raise ValueError("summaries end with the tokenizer's eos token, and this tokenizer has none: set one.")
    before, behind = prompt_frame(tokenizer)

    def encode_one(document_ids: list[int], summary_ids: list[int]) -> Tokens | str:
        answer = [*summary_ids, tokenizer.eos_token_id]
        room = total_length - len(before) - len(behind) - len(answer)
        if room < 1:
            return f"summary too long for {total_length} tokens"
        if len(document_ids) > room and too_long == "drop":
            return f"over {total_length} tokens"
        prompt = [*before, *document_ids[:room], *behind]
        remark = f"cut to {total_length} tokens" if len(document_ids) > room else ""
        return Tokens(np.array(prompt + answer), len(prompt), remark)

    def encode(documents: Sequence[Document]) -> list[Tokens | str]:
        texts = _ids(tokenizer, [document.text for document in documents])
        summaries = _ids(tokenizer, [document.summary for document in documents])
        return [encode_one(*pair) for pair in zip(texts, summaries, strict=True)]

    return encode
