"""Text to token ids: the tokens that a text begins with, and long texts in pieces.

Every command follows one rule. A text begins with the tokens that the tokenizer's template puts before it, or with
`bos_token` if the template does not add any. No template adds tokens after a text, because a prompt or a book goes on;
documents to train on end with `eos_token`.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

CHARACTERS_PER_PIECE = 2**16  # a tokenizer holds hundreds of bytes for every token of a call
CHARACTERS_AROUND = 128  # of a border, on either side
MOST_TRIALS = 64  # of borders, before the rest of a text becomes one piece
# A space between two words, or a line break before the next line.
BORDER = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=\S)")


def template_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer's template puts before and after a text."""
    special = set(tokenizer.all_special_ids)
    for token in range(len(tokenizer)):
        word = "" if token in special else tokenizer.convert_ids_to_tokens(token)
        if not word or not (plain := plain_ids(tokenizer, word)):
            continue
        framed = tokenizer(word, verbose=False)["input_ids"]
        count = len(plain)
        places = [place for place in range(len(framed)) if framed[place : place + count] == plain]
        if len(places) == 1:  # else a token of the template looks like the word's
            return framed[: places[0]], framed[places[0] + count :]
    raise ValueError(f"no token of the tokenizer {tokenizer.name_or_path!r} stands for a text: use another one.")


def first_tokens(tokenizer: Any) -> list[int]:
    """Returns the tokens that a text begins with."""
    before, _ = template_tokens(tokenizer)
    return before or ([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])


def encode(tokenizer: Any, text: str, with_first: bool = True) -> torch.Tensor:
    """Returns the token ids [1, N] of a text, after its first tokens unless `with_first` is False.

    Memory holds the ids and the tokenizer's data for one piece of the text.
    """
    pieces = [torch.tensor(first_tokens(tokenizer) if with_first else [], dtype=torch.int32)]
    pieces += [torch.tensor(plain_ids(tokenizer, piece), dtype=torch.int32) for piece in pieces_of(tokenizer, text)]
    return torch.cat(pieces).long()[None]


def pieces_of(tokenizer: Any, text: str) -> Iterator[str]:
    """Yields the pieces of a text. Their tokens, one piece after the other, are the tokens of the whole text.

    A border is used only if the characters around it have the same tokens in two parts as in one. SentencePiece
    tokenizers put a space before each piece, so the space at a border belongs to neither piece. A text without borders,
    as in languages without spaces, is one piece.
    """
    start = 0
    while len(text) - start > CHARACTERS_PER_PIECE:
        found = _find_border(tokenizer, text, start + CHARACTERS_PER_PIECE)
        if found is None:
            break
        end, following = found
        yield text[start:end]
        start = following
    yield text[start:]


def _find_border(tokenizer: Any, text: str, lowest: int) -> tuple[int, int] | None:
    """Returns the first border from `lowest` on: the end of one piece and the start of the next."""
    for _, match in zip(range(MOST_TRIALS), BORDER.finditer(text, lowest), strict=False):
        end = match.start()
        before, behind = text[max(0, end - CHARACTERS_AROUND) : end], text[end : end + CHARACTERS_AROUND]
        whole, left = plain_ids(tokenizer, before + behind), plain_ids(tokenizer, before)
        for skipped in range(1 + behind.startswith(" ")):
            if left + plain_ids(tokenizer, behind[skipped:]) == whole:
                return end, end + skipped
    return None


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text, without the tokens of the template."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
