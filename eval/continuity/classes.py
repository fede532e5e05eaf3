"""Classes of next tokens, and the probability of each class.

Axes: F factors, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .items import NotValid, Watched

DIGITS = [str(digit) for digit in range(10)]
SHOWN_FROM = 0.05  # classes that never reach this probability are drawn as one

Classes = dict[str, list[int]]


@lru_cache(maxsize=8)
def vocabulary(tokenizer: Any) -> list[str]:
    """The text of every token, without white space around it."""
    return [tokenizer.decode([token]).strip() for token in range(len(tokenizer))]


def digit_classes(tokenizer: Any) -> Classes:
    """For each digit the tokens that are that digit."""
    return word_classes(tokenizer, DIGITS)


def first_digit_classes(tokenizer: Any) -> Classes:
    """The tokens made of digits, by their first digit: a tokenizer may have one token for 37."""
    numbers = [(n, text) for n, text in enumerate(vocabulary(tokenizer)) if text.isascii() and text.isdecimal()]
    return _known({digit: [n for n, text in numbers if text[0] == digit] for digit in DIGITS}, tokenizer)


def word_classes(tokenizer: Any, words: Sequence[str]) -> Classes:
    """For each word its tokens, in upper or lower case; for a word without a token those of its beginning."""
    tokens_of: dict[str | None, list[int]] = defaultdict(list)
    for n, text in enumerate(vocabulary(tokenizer)):
        tokens_of[text.lower()].append(n)
    return _known(
        {word: tokens_of.get(word) or tokens_of.get(_beginning(tokenizer, word), []) for word in words}, tokenizer
    )


def _beginning(tokenizer: Any, word: str) -> str | None:
    """The text of the first token of a word; None where the tokenizer does not know the word."""
    names = vocabulary(tokenizer)
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    known = [token for token in ids if names[token] and token not in tokenizer.all_special_ids]
    return names[known[0]].lower() if known else None


def _known(classes: Classes, tokenizer: Any) -> Classes:
    """The classes. Raises `NotValid` for a class without a token, and for classes that share a token."""
    if missing := [name for name, tokens in classes.items() if not tokens]:
        raise NotValid(f"the tokenizer has no token for {', '.join(missing)}")
    tokens = [token for members in classes.values() for token in members]
    if len(set(tokens)) < len(tokens):
        raise NotValid(f"{', '.join(classes)} begin with the same token")
    return classes


@lru_cache(maxsize=32)
def watched_classes(tokenizer: Any, watched: Watched) -> Classes:
    """The classes of the next token that an item watches; none for `tokens`."""
    if watched == "digits":
        return digit_classes(tokenizer)
    if watched == "first_digits":
        return first_digit_classes(tokenizer)
    words = {"yes_no": ("yes", "no"), "bits": ("1", "0"), "tokens": ()}[watched]
    return word_classes(tokenizer, words)


def likely_tokens(probabilities_FV: torch.Tensor, tokenizer: Any) -> Classes:
    """The tokens that reach 5 % at some factor; tokens of the same text are one class."""
    classes, names = defaultdict(list), vocabulary(tokenizer)
    for token in (probabilities_FV >= SHOWN_FROM).any(0).nonzero()[:, 0].tolist():
        name = names[token] if token < len(names) else ""
        classes[name or repr(tokenizer.decode([token]))].append(token)
    return dict(classes)


def class_curves(probabilities_FV: torch.Tensor, classes: Classes) -> dict[str, list[float]]:
    """The probability of each class at each factor."""
    return {name: probabilities_FV[:, tokens].sum(1).tolist() for name, tokens in classes.items()}
