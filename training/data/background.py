"""The text that facts are hidden in: sentences as tokens. A part of it can have any length."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .encoding import encode_within

# A sentence ends with its mark and closing quotes; "Mr. Knightley" is not two sentences.
SENTENCE = re.compile(
    r"\S.*?(?:(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?]+[\"'\u201d\u2019)\]_]*(?=\s|$)|\Z|\n\s*\n)", re.DOTALL
)
SENTENCES_AT_ONCE = 2**12  # in a call of the tokenizer


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text, with single spaces between words. The end of a paragraph ends a sentence."""
    return [" ".join(sentence.split()) for sentence in SENTENCE.findall(text)]


class Background:
    """Sentences in their order; after the last one the first one follows."""

    def __init__(self, tokenizer: Any, sentences: Iterable[str]):
        """Raises `ValueError` if there is no sentence."""
        self.tokenizer, self.texts = tokenizer, [f" {sentence}" for sentence in sentences]
        starts = range(0, len(self.texts), SENTENCES_AT_ONCE)
        calls = (encode_within(tokenizer, self.texts[start : start + SENTENCES_AT_ONCE]) for start in starts)
        ids = [sentence for call in calls for sentence in call if sentence]
        if not ids:
            raise ValueError("the background text has no sentences: name files with text.")
        self.tokens = np.fromiter(chain.from_iterable(ids), np.int64)
        self.ends = np.cumsum([len(sentence) for sentence in ids])
        self._two_rounds = np.concatenate([self.ends - len(self.tokens), self.ends])

    def naming(self, words: Sequence[str], most_tokens: int) -> list[list[int]]:
        """Returns the sentences of at most `most_tokens` tokens that have one of the words."""
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b")
        found = encode_within(self.tokenizer, [text for text in self.texts if word.search(text)])
        return [sentence for sentence in found if 0 < len(sentence) <= most_tokens]

    def part(self, num_tokens: int, num_gaps: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns `num_tokens` tokens up to the end of a random sentence, and `num_gaps` random gaps between sentences.

        The first sentence may lack its beginning. A gap is the number of tokens before it. Gaps are sorted and may be
        equal; the two ends of the part count as gaps.
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
