"""Prompts of the probes of space, boolean values, translation, scaling and density, with an answer to each.

A small model learns the answers at both ends of a path, and the probes ask for what it says in between. No text lies on
the path itself, so it can't be learned by heart.
"""

from collections.abc import Callable, Iterator
from itertools import product
from random import Random

from .data import load
from .prompts import BOOLEAN_TEMPLATES, YES_OR_NO
from .space import NUM_PAIRS, OPERATORS, PUBLISHED_SENTENCES, QUESTIONS, SENTENCES, STORIES
from .transformations import SENTENCES as WHOLE_SENTENCES

TRUTH: dict[str, Callable[[int, int], int]] = {
    "AND": lambda left, right: left & right,
    "OR": lambda left, right: left | right,
    "XOR": lambda left, right: left ^ right,
    "NAND": lambda left, right: 1 - (left & right),
    "NOR": lambda left, right: 1 - (left | right),
}
# Whether yes is the answer to a kind of question, for the first object and for the second.
YES = {"both": (True, True), "neither": (False, False), "first": (True, False), "second": (False, True)}
PROBED_YES = {
    "Are {} red?": "first",
    "Are {} fruits?": "both",
    "Are {} animals?": "both",
    "Do {} meow?": "first",
    "Does {} contain sugar?": "second",
    "Is {} a drink?": "both",
}
# The next word for the first object and for the second. Sentences that ask to repeat the word need no entry.
NEXT = {
    "Alice bought some {} at the": ("market", "shop"),
    "The most common colour for {} is": ("red", "yellow"),
    "The most common colour of {} is": ("red", "yellow"),
    "Alice saw some {} in the": ("house", "park"),
    "We drank some {} in the": ("garden", "kitchen"),
    "We bought two {} at the": ("market", "shop"),
    "{} are usually kept as": ("companions", "guards"),
    "We used the {} to eat": ("noodles", "soup"),
    "Typically, {} are made of": ("metal", "wood"),
    "Once upon a time, there was a little {} named": ("Lily", "Tim"),
    "The {} was happy because": ("she", "he"),
    "Once upon a time, there was a big {}. It liked to": ("sleep", "run"),
    "The {} was sad because": ("nobody", "it"),
}
WHOLE = {"France": "Paris", "Gatsby": "book", "Romeo": "Romeo", "Lily": "Lily"}


def object_questions() -> Iterator[tuple[str, str]]:
    """Yields prompts and answers: about the objects of the data set, and the probe's own questions."""
    asked = [
        (record["options"], kind, question)
        for record in load("objects")[:NUM_PAIRS]
        for kind, question in record["questions"].items()
    ]
    asked += [(words, PROBED_YES[question], question) for words, own in QUESTIONS.items() for question in own]
    for words, kind, question in asked:
        for word, is_yes in zip(words, YES[kind], strict=True):
            yield YES_OR_NO.format(question=question.replace("{}", word)), "yes" if is_yes else "no"


def boolean_questions() -> Iterator[tuple[str, str]]:
    names = dict.fromkeys(operator for pair in OPERATORS for operator in pair)
    for template, operator, left, right in product(BOOLEAN_TEMPLATES.values(), names, (0, 1), (0, 1)):
        yield template.format(left=left, operator=operator, right=right), str(TRUTH[operator](left, right))


def sentences() -> Iterator[tuple[str, str]]:
    """Yields sentences, each with the word that comes next."""
    frames = {
        (words, frame)
        for group in (SENTENCES, PUBLISHED_SENTENCES, STORIES)
        for words, own in group.items()
        for frame in own
    }
    for words, frame in sorted(frames):
        for word, answer in zip(words, NEXT.get(frame, words), strict=True):
            yield frame.replace("{}", word), answer
    for name, sentence in WHOLE_SENTENCES.items():
        yield sentence, WHOLE[name]


class Answering:
    """Draws questions about objects half of the time, boolean questions and sentences a quarter of the time each."""

    def __init__(self, random: Random):
        self.random = random
        objects, boolean, others = list(object_questions()), list(boolean_questions()), list(sentences())
        self.groups = (objects, objects, boolean, others)

    def texts(self) -> Iterator[str]:
        """Yields texts with every word of prompts and answers."""
        for group in self.groups:
            for prompt, answer in group:
                yield f"{prompt} {answer}"

    def question(self) -> dict[str, str]:
        prompt, answer = self.random.choice(self.random.choice(self.groups))
        return {"prompt": prompt, "answer": answer}
