"""Tokens of a text as it stands within a longer one."""

from collections.abc import Sequence
from typing import Any


def encode_within(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text after a line break, without those of the break.

    Tokenizers of the SentencePiece kind put a space before the first word of all that they are given: a text that is
    made of parts, each encoded alone, would have one space too many before each of them.
    """
    if not texts:
        return []
    start, *encoded = tokenizer(["\n", *(f"\n{text}" for text in texts)], add_special_tokens=False)["input_ids"]
    if all(ids[: len(start)] == start for ids in encoded):
        return [ids[len(start) :] for ids in encoded]
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # one that joins line breaks to words
