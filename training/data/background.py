"""The text that facts are hidden in: sentences as tokens, a part of which can have any length."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .encoding import encode_within

# A sentence ends with its mark and closing quotes; "Mr. Knightley" is not two sentences.
SENTENCE = re.compile(
    r"\S.*?(?:(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?]+[\"'\u201d\u2019)\]_]*(?=\s|$)|\Z|\n\s*\n)", re.DOTALL
)
SENTENCES_AT_ONCE = 2**12  # in a call of the tokenizer


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, with single spaces between their words; a paragraph ends the sentence before it."""
    return [" ".join(sentence.split()) for sentence in SENTENCE.findall(text)]


class Background:
    """Sentences in their order; after the last one the first one follows."""

    def __init__(self, tokenizer: Any, sentences: Iterable[str]):
        """Raises `ValueError` where there is no sentence."""
        self.tokenizer = tokenizer
        texts = [f" {sentence}" for sentence in sentences]
        self.texts = texts
        ids: list[list[int]] = []
        for first in range(0, len(texts), SENTENCES_AT_ONCE):
            ids += encode_within(tokenizer, texts[first : first + SENTENCES_AT_ONCE])
        ids = [sentence for sentence in ids if sentence]
        if not ids:
            raise ValueError("the background text has no sentences: name files with text.")
        self.tokens = np.fromiter((token for sentence in ids for token in sentence), np.int64)
        self.ends = np.cumsum([len(sentence) for sentence in ids])
        self._two_rounds = np.concatenate([self.ends - len(self.tokens), self.ends])

    def naming(self, words: Sequence[str], most_tokens: int) -> list[list[int]]:
        """The sentences of at most `most_tokens` tokens that have one of the words."""
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b")
        found = encode_within(self.tokenizer, [text for text in self.texts if word.search(text)])
        return [sentence for sentence in found if 0 < len(sentence) <= most_tokens]

    def part(self, num_tokens: int, num_gaps: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """`num_tokens` tokens that end with a random sentence, and `num_gaps` random places between their sentences.

        The first sentence lacks its beginning. A place is the number of tokens before it; they are sorted, several may
        be the same, and the ends of the part are among those that are drawn from.
        """
        whole, sentences = len(self.tokens), len(self.ends)
        last = int(generator.integers(sentences))
        end = int(self.ends[last])
        rounds, rest = divmod(num_tokens, whole)
        in_rest = np.diff(np.searchsorted(self._two_rounds, [end - rest, end], side="right"))[0]
        inside = rounds * sentences + in_rest  # sentences that end in the part
        back = np.sort(generator.integers(0, inside + 1, num_gaps))[::-1]  # counted from the last; `inside`: the start
        before = self._two_rounds[last + sentences - back % sentences] - end - back // sentences * whole
        gaps = np.where(back == inside, 0, num_tokens + before)
        return self.tokens[np.arange(end - num_tokens, end) % whole], gaps
