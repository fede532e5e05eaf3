"""Tokens of a text as it stands within a longer one."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

ENCODED_TEXTS = 2**16  # kept: all sentences of the generated tasks


def encode_within(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each text after a line break, without the tokens of the break.

    SentencePiece tokenizers put a space before the first word of their input. Parts of a text that are encoded one by
    one would each begin with one space too many.
    """
    if not texts:
        return []
    start, *encoded = tokenizer(["\n", *(f"\n{text}" for text in texts)], add_special_tokens=False)["input_ids"]
    if all(ids[: len(start)] == start for ids in encoded):
        return [ids[len(start) :] for ids in encoded]
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # it joins line breaks to words


def remembering_encoder(tokenizer: Any, before: str = "") -> Callable[[str], list[int]]:
    """Returns `encode_within` for one text at a time, after the characters `before`. Remembers the last texts."""
    return lru_cache(ENCODED_TEXTS)(lambda text: encode_within(tokenizer, [before + text])[0])


def unknown_words(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """Returns the words that the tokenizer does not know."""
    encoded = encode_within(tokenizer, [f" {word}" for word in words])
    return [word for word, ids in zip(words, encoded, strict=True) if tokenizer.unk_token_id in ids]


def equally_long(encode: Callable[[str], list[int]], words: Sequence[str]) -> list[str]:
    """Returns the words of the most common number of tokens, so texts with any of them have the same length."""
    by_length = defaultdict(list)
    for word in words:
        by_length[len(encode(" " + word))].append(word)
    return max(by_length.values(), key=len)
