"""Tokens of a text as it stands within a longer one."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

ENCODED_TEXTS = 2**16  # kept: all sentences of the generated tasks


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


def remembering_encoder(tokenizer: Any, before: str = "") -> Callable[[str], list[int]]:
    """`encode_within` of one text at a time, after the characters `before`; the tokens of the last texts are kept."""
    return lru_cache(ENCODED_TEXTS)(lambda text: encode_within(tokenizer, [before + text])[0])


def equally_long(encode: Callable[[str], list[int]], words: Sequence[str]) -> list[str]:
    """The words of the most common number of tokens, so that texts with any of them have the same length."""
    by_length = defaultdict(list)
    for word in words:
        by_length[len(encode(" " + word))].append(word)
    return max(by_length.values(), key=len)
