"""Questions that teach small models to count, to add and to answer, for the probes; and Llamas to train on them.

All tokens have a duration of one unit. The probes' pairs of numbers, passages and whole tutorials are left out. Each
word occurs equally often with every count: without one of them, the model would learn that the word never has it. For
probes between two words, both ends are taught: see `answers`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from condense.training.data.passkey import PASSKEY_TEXTS
from condense.training.small_llama import small_llama, word_tokenizer

from .answers import Answering
from .data import load
from .prompts import (
    EVENTS_QUESTION,
    FILLER,
    PAIRS,
    SUM,
    asked_word,
    counting_prompt,
    step_char_spans,
    sum_prompt,
    tutorial,
)
from .prompts import PASSAGES as PROBED

MOST = 9  # the answer is one digit
MOST_FILLERS = 9
NUMBERS = range(1, 100)
PEOPLE = {"Alice": "She", "Emily": "She", "Nora": "She", "Tom": "He", "Oscar": "He", "Hugo": "He"}
PASSAGES = {
    "goes to the shop": (
        "{who} buys {what}.",
        "How many items did {name} buy?",
        "a carton of milk,an apple,a potato,a loaf of bread,a lemon,a bag of rice,a bottle of water,an onion,a cake",
    ),
    "went to the zoo": (
        "{who} saw {what}.",
        "How many animals did {name} see?",
        "a lion,an elephant,a giraffe,a penguin,a monkey,a zebra,a snake,a bear,a parrot",
    ),
    "went to the beach": (
        "{who} found {what}.",
        "How many things did {name} find?",
        "a seashell,a starfish,a smooth stone,a piece of seaweed,a crab,a feather,an old coin,a bottle,a stick",
    ),
}
PLURAL = ("The class", "They")

Question = dict[str, str]


class Counting:
    """Asks for the number of words, steps or events."""

    def __init__(self, random: Random):
        self.random = random
        self.words = load("words")
        self.passages = [set(events) for _, events, _ in PROBED.values()]
        self.tutorials = [_parts(record["sentence"]) for record in load("tutorials")]

    def texts(self) -> Iterator[str]:
        """Yields texts with every word of prompts and answers, and of the probe of memory."""
        yield from (*PASSKEY_TEXTS, FILLER)
        for record in self.words:
            for template in ("sentence", "listed"):
                yield counting_prompt(*asked_word(record | {"repetitions": 1}), template).text
        yield counting_prompt("apple", 1, "fruit", "a fruit", "apart", 1).text
        yield "apple fruit a fruit fruits cat animal an animal animals rose flower a flower flowers"
        yield from (record["sentence"] for record in load("tutorials"))
        for scene, parts in PASSAGES.items():
            yield " ".join([scene, *parts, *PEOPLE, *PLURAL, "She He", EVENTS_QUESTION])

    def question(self) -> Question:
        return self.random.choice(
            (self.words_question, self.words_question, self.steps_question, self.events_question)
        )()

    def words_question(self, templates: Sequence[str] = ("sentence", "listed", "apart", "apart")) -> Question:
        record, repetitions = self.random.choice(self.words), self.random.randint(1, MOST)
        template = self.random.choice(templates)
        fillers = self.random.randint(0, MOST_FILLERS) if template == "apart" else 0
        asked = asked_word(record | {"repetitions": repetitions})
        return _question(counting_prompt(*asked, template, fillers).text, repetitions)

    def steps_question(self) -> Question:
        title, own = self.random.choice(self.tutorials)
        steps = [self.random.choice(self.random.choice(self.tutorials)[1]) for _ in range(self.random.randint(1, MOST))]
        return self.steps_question() if steps == own else _question(tutorial(title, steps), len(steps))

    def events_question(self) -> Question:
        scene = self.random.choice(list(PASSAGES))
        event, asked, things = PASSAGES[scene]
        name, who = self.random.choice([*PEOPLE.items(), PLURAL])
        some = self.random.sample(things.split(","), self.random.randint(1, MOST))
        if {event.format(who=who, what=what) for what in some} in self.passages:
            return self.events_question()
        passage = " ".join([f"{name} {scene}.", *(event.format(who=who, what=what) for what in some)])
        return _question(EVENTS_QUESTION.format(passage=passage, question=asked.format(name=name)), len(some))


class Adding:
    """Asks for sums of numbers of one or two digits."""

    def __init__(self, random: Random):
        self.random = random
        self.records = load("sums")
        pairs = [(record["fields"]["item_1"], record["fields"]["item_2"]) for record in self.records]
        turned = [(first, int(str(second)[::-1])) for first, second in PAIRS]
        self.asked = {frozenset(pair) for pair in (*pairs, *PAIRS, *turned)}

    def texts(self) -> Iterator[str]:
        """Yields texts with every word of prompts and answers."""
        yield SUM
        yield from (record["template"].format(**record["fields"]) for record in self.records)

    def question(self) -> Question:
        first, second = self.random.choice(NUMBERS), self.random.choice(NUMBERS)
        if frozenset((first, second)) in self.asked:
            return self.question()
        if self.random.random() < 0.5:
            return _question(SUM.format(first=first, second=second), first + second)
        record = self.random.choice(self.records)
        fields = record["fields"] | {"item_1": first, "item_2": second}
        return _question(sum_prompt(record["template"], fields, "item_1").text, first + second)


KINDS: dict[str, type[Counting | Adding | Answering]] = {"counting": Counting, "adding": Adding, "answering": Answering}


def _question(prompt: str, answer: int) -> Question:
    return {"prompt": prompt, "answer": str(answer)}


def _parts(text: str) -> tuple[str, list[str]]:
    """Returns the title and the steps of a tutorial."""
    title = text.split("\n")[0].removeprefix("Tutorial: ")
    return title, [text[start:end].removeprefix("- ") for start, end in step_char_spans(text)]


def write_questions(folder: Path, seed: int, num_questions: int, width: int, layers: int) -> None:
    """Writes FOLDER/KIND.jsonl and FOLDER/KIND_llama for each kind of `KINDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in KINDS.items():
        maker = kind(Random(seed))
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(maker.question()) + "\n" for _ in range(num_questions))
        tokenizer = questions_tokenizer(maker.texts())
        small_llama(tokenizer, seed, width, layers).save_pretrained(folder / f"{name}_llama")
        tokenizer.save_pretrained(folder / f"{name}_llama")


def questions_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that knows every word of the texts, and begins each text with a bos token, as a Llama's."""
    tokenizer = word_tokenizer(list(texts))
    first = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    return tokenizer
