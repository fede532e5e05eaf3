"""Divides the prompts and words of the steering experiments into trained and held-out ones.

The paper trains on one prompt and two words. Here whole subjects and whole word pairs are held out, drawn by seed. The
paper's own prompt and pair are always trained.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from typing import NamedTuple, TypeVar

PAPER_PROMPT, PAPER_PAIR = "The movie was", ("good", "bad")
# Dimensions of the joint control: the value at +1, the value at -1.
DIMENSIONS = {"sentiment": ("positive", "negative"), "topic": ("person", "food"), "length": ("long", "short")}
HELD_OUT = 3  # one in so many subjects, pairs or prompts is held out; in a cell, one word

Signs = tuple[float, ...]
Value = TypeVar("Value")


class Parts(NamedTuple):
    """Trained and held-out prompts and words; words are pairs (positive, negative)."""

    train_prompts: tuple[str, ...]
    test_prompts: tuple[str, ...]
    train_pairs: tuple[tuple[str, str], ...]
    test_pairs: tuple[tuple[str, str], ...]


class JointParts(NamedTuple):
    """Parts for several dimensions: words by the signs of their dimensions, in the order of `DIMENSIONS`."""

    train_prompts: tuple[str, ...]
    test_prompts: tuple[str, ...]
    train_words: dict[Signs, tuple[str, ...]]
    test_words: dict[Signs, tuple[str, ...]]


def split_values(values: Sequence[Value], held_out: Sequence[Value]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Returns the trained and the held-out values, each in their order."""
    return tuple(v for v in values if v not in held_out), tuple(v for v in values if v in held_out)


@dataclass(frozen=True)
class Lexicon:
    """`subjects`: prompts by topic. `cells`: words by signs; they continue any of `prompts`."""

    subjects: dict[str, tuple[str, ...]]
    pairs: tuple[tuple[str, str], ...]
    prompts: tuple[str, ...]
    cells: dict[Signs, tuple[str, ...]]

    def split(self, seed: int) -> Parts:
        """Holds out whole subjects: prompts of one subject resemble each other."""
        draw = random.Random(seed)
        subjects = [name for name, prompts in self.subjects.items() if PAPER_PROMPT not in prompts]
        held_out = draw.sample(subjects, len(self.subjects) // HELD_OUT)
        test_prompts = [prompt for name in held_out for prompt in self.subjects[name]]
        test_pairs = draw.sample([pair for pair in self.pairs if pair != PAPER_PAIR], len(self.pairs) // HELD_OUT)
        prompts = [prompt for own in self.subjects.values() for prompt in own]
        return Parts(*split_values(prompts, test_prompts), *split_values(self.pairs, test_pairs))

    def joint_split(self, seed: int) -> JointParts:
        draw = random.Random(seed)
        test_prompts = draw.sample(self.prompts, len(self.prompts) // HELD_OUT)
        words = {signs: split_values(words, [draw.choice(words)]) for signs, words in self.cells.items()}
        train_words, test_words = ({signs: parts[side] for signs, parts in words.items()} for side in (0, 1))
        return JointParts(*split_values(self.prompts, test_prompts), train_words, test_words)

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def small(self) -> "Lexicon":
        """Returns the start of each list, for models with a small vocabulary, in which most words have many tokens."""
        subjects = {name: prompts[:1] for name, prompts in list(self.subjects.items())[:4]}
        cells = {signs: words[:2] for signs, words in self.cells.items()}
        return Lexicon(subjects, self.pairs[:3], self.prompts[:3], cells)


@cache
def lexicon() -> Lexicon:
    """Loads the package's own prompts and words."""
    found = json.loads((files(__package__) / "data" / "steering.json").read_text(encoding="utf-8"))
    cells = {}
    for cell in found["cells"]:
        signs = tuple(1.0 if cell[name] == plus else -1.0 for name, (plus, _) in DIMENSIONS.items())
        cells[signs] = tuple(cell["words"])
    assert set(cells) == set(product((1.0, -1.0), repeat=len(DIMENSIONS)))
    return Lexicon(
        {name: tuple(prompts) for name, prompts in found["subjects"].items()},
        tuple((positive, negative) for positive, negative in found["pairs"]),
        tuple(found["prompts"]),
        cells,
    )
