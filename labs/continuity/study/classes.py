"""Classes of next tokens, and their probabilities.

Axes: F factors, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from .items import NotValid, Watched
from .options import Rule

DIGITS = [str(digit) for digit in range(10)]
SHOWN_FROM = 0.05  # classes that never reach this probability are drawn as one

Classes = dict[str, list[int]]

# The published classes: a token belongs to the first class that has a part of it.
_DIGIT_PARTS: dict[str, tuple[str, ...]] = {digit: (digit,) for digit in DIGITS}
PUBLISHED_PARTS: dict[Watched, dict[str, tuple[str, ...]]] = {
    "digits": _DIGIT_PARTS,
    "first_digits": _DIGIT_PARTS,
    "yes_no": {"yes": ("yes",), "no": ("no",)},
    "bits": {"1": ("1", "tr"), "0": ("0", "fa")},
    "tokens": {},
}


@lru_cache(maxsize=8)
def vocabulary(tokenizer: Any) -> list[str]:
    """Returns the text of every token, without white space around it."""
    return [tokenizer.decode([token]).strip() for token in range(len(tokenizer))]


def first_digit_classes(tokenizer: Any) -> Classes:
    """Returns the tokens made of digits, by their first digit: a tokenizer may have one token for 37."""
    numbers = [(n, text) for n, text in enumerate(vocabulary(tokenizer)) if text.isascii() and text.isdecimal()]
    return _check_tokens({digit: [n for n, text in numbers if text[0] == digit] for digit in DIGITS}, tokenizer)


def word_classes(tokenizer: Any, words: Sequence[str]) -> Classes:
    """Returns each word's tokens, in upper or lower case; for a word without a token, its first piece's tokens."""
    tokens_of: dict[str | None, list[int]] = defaultdict(list)
    for n, text in enumerate(vocabulary(tokenizer)):
        tokens_of[text.lower()].append(n)
    found = {word: tokens_of.get(word) or tokens_of.get(_beginning(tokenizer, word), []) for word in words}
    return _check_tokens(found, tokenizer)


def substring_classes(tokenizer: Any, parts: Mapping[str, Sequence[str]]) -> Classes:
    """Returns the published classes: for each name, the tokens that contain one of its parts, in upper or lower case.

    A token is in the first class that it fits, so "21" counts as "1". Tokens of single bytes ("<0x31>") do not count.
    A token's text is its entry in the vocabulary, with the mark for a space.
    """
    classes: Classes = {name: [] for name in parts}
    for text, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        fitting = (name for name, wanted in parts.items() if any(part in text.lower() for part in wanted))
        name = None if "0x" in text else next(fitting, None)
        if name is not None:
            classes[name].append(token)
    return _check_tokens(classes, tokenizer)


def _beginning(tokenizer: Any, word: str) -> str | None:
    """Returns the text of a word's first token; None if the tokenizer does not know the word."""
    names = vocabulary(tokenizer)
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    known = [token for token in ids if names[token] and token not in tokenizer.all_special_ids]
    return names[known[0]].lower() if known else None


def _check_tokens(classes: Classes, tokenizer: Any) -> Classes:
    """Returns the classes. Raises `NotValid` for a class without a token, and for classes that share a token."""
    if missing := [name for name, tokens in classes.items() if not tokens]:
        raise NotValid(f"the tokenizer has no token for {', '.join(missing)}")
    tokens = [token for members in classes.values() for token in members]
    if len(set(tokens)) < len(tokens):
        raise NotValid(f"{', '.join(classes)} begin with the same token")
    return classes


@lru_cache(maxsize=32)
def watched_classes(tokenizer: Any, watched: Watched, rule: Rule = "exact") -> Classes:
    """Returns the classes of the next token that an item watches, by either rule; none for `tokens`."""
    if rule == "published":
        return substring_classes(tokenizer, PUBLISHED_PARTS[watched])
    if watched == "first_digits":
        return first_digit_classes(tokenizer)
    return word_classes(
        tokenizer, {"digits": DIGITS, "yes_no": ("yes", "no"), "bits": ("1", "0"), "tokens": ()}[watched]
    )


def likely_tokens(probabilities_FV: torch.Tensor, tokenizer: Any) -> Classes:
    """Returns the tokens that reach 5 % at some factor; tokens with the same text are one class."""
    classes, names = defaultdict(list), vocabulary(tokenizer)
    for token in (probabilities_FV >= SHOWN_FROM).any(0).nonzero()[:, 0].tolist():
        name = names[token] if token < len(names) else ""
        classes[name or _visible(tokenizer, token)].append(token)
    return dict(classes)


def _visible(tokenizer: Any, token: int) -> str:
    """Returns white space as marks. Some tokenizers decode a single space to nothing; then the piece's name is used."""
    text = tokenizer.decode([token]) or tokenizer.convert_ids_to_tokens(token) or ""
    return repr(text)[1:-1].replace("▁", " ").replace("<0x20>", " ").replace(" ", "␣") or "(no text)"


def class_curves(probabilities_FV: torch.Tensor, classes: Classes) -> dict[str, list[float]]:
    """Returns the probability of each class at each factor."""
    return {name: round_values(probabilities_FV[:, tokens].sum(1).tolist()) for name, tokens in classes.items()}


def round_values(values: Iterable[float]) -> list[float]:
    """Rounds to six significant digits, so small probabilities keep their order."""
    return [float(f"{value:.6g}") for value in values]
