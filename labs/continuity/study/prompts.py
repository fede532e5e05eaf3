"""The prompts of the probes, with the spans of characters that vary. Small models are taught to answer them."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

CharSpan = tuple[int, int]

FILLER = "The grass is green. The sky is blue. The sun is yellow."

COUNTING_TEMPLATES = {
    "sentence": 'Question: In the sentence "{words}", how many times is {category_with_article} mentioned? '
    "Reply with a single-digit number\nAnswer: ",
    "listed": 'Question: How many {category}s are listed in the sentence "{words}"? '
    "Reply with a single-digit number\nAnswer: ",
    "apart": 'Sentence: "{words}".\n{filler}Question: In the sentence, how many times is {category_with_article} '
    "mentioned? Reply with a single-digit number\nAnswer: ",
}
EVENTS_QUESTION = "Question: {passage} {question} Reply with a single-digit number\nAnswer: "
SUM = "The sum of {first} and {second} is "
YES_OR_NO = "Question: {question} (yes/no)\nAnswer:"
BOOLEAN_TEMPLATES = {
    "sentence": "Question: What is {left} {operator} {right}? Reply with 0 or 1\nAnswer: ",
    "published": "Question: What is the truth value of the following statement?\n{left} {operator} {right}\n"
    "Answer (0 or 1): ",
}
PAIRS = ((24, 13), (32, 56), (13, 74), (52, 31), (14, 23), (16, 42), (82, 14), (38, 51))
PASSAGES = {
    "shop": (
        "Alice goes to the shop.",
        ("She buys a carton of milk.", "She buys an apple.", "She buys a potato.", "She buys a loaf of bread."),
        "How many items did Alice buy?",
    ),
    "zoo": (
        "The class went to the zoo.",
        ("They saw a lion.", "They saw an elephant.", "They saw a giraffe.", "They saw a penguin."),
        "How many animals did the class see?",
    ),
    "beach": (
        "Emily went to the beach.",
        (
            "She found a seashell.",
            "She found a starfish.",
            "She found a smooth stone.",
            "She found a piece of seaweed.",
        ),
        "How many things did Emily find?",
    ),
}


def asked_word(record: dict[str, Any]) -> tuple[str, int, str, str]:
    """Returns the first arguments of `counting_prompt`, from a record of the data set of words."""
    return record["word"], record["repetitions"], record["category"], record["category_with_article"]


class Prompt(NamedTuple):
    text: str
    char_spans: list[CharSpan]


def char_spans_of(text: str, part: str, start: int = 0, end: int | None = None) -> list[CharSpan]:
    """Returns the spans of `part` in `text`, between two characters."""
    found = re.compile(re.escape(part)).finditer(text, start, len(text) if end is None else end)
    return [match.span() for match in found]


def counting_prompt(
    word: str, repetitions: int, category: str, with_article: str, template: str = "sentence", num_fillers: int = 0
) -> Prompt:
    """Returns a repeated word with the question how often it occurs, and the spans of the word."""
    text = COUNTING_TEMPLATES[template].format(
        words=" ".join([word] * repetitions),
        category=category,
        category_with_article=with_article,
        filler=f"{FILLER}\n" * num_fillers,
    )
    start = text.index('"') + 1
    return Prompt(text, char_spans_of(text, word, start, text.index('"', start)))


def tutorial(title: str, steps: Sequence[str]) -> str:
    """Returns a tutorial in the form of the paper's data set, with the question how many steps it has."""
    listed = "\n".join(f"- {step}" for step in steps)
    return (
        f"Tutorial: {title}\n\n{listed}\n\nQuestion: How many steps are necessary to complete the tutorial? "
        "Reply with a single-digit number\nAnswer: It takes "
    )


def step_char_spans(text: str) -> list[CharSpan]:
    """Returns the spans of a tutorial's steps."""
    return [match.span() for match in re.finditer("^- .*", text, flags=re.MULTILINE)]


def sum_prompt(template: str, fields: dict[str, object], shrunk: str) -> Prompt:
    """Returns the template with its fields, and the span of the number in the field `shrunk`."""
    before = template[: template.index(f"{{{shrunk}}}")].format(**fields)
    text = template.format(**fields)
    return Prompt(text, [(len(before), len(before) + len(str(fields[shrunk])))])
