"""The recall task: who has what, said in single sentences between irrelevant ones, and a question about one of them.

It measures how much a memory holds. If each word is a token, a sentence has six: two words for a key, one for its
value, and three others. A value is a word, since tokenizers may cut numbers into digits. It carries five bits. Forms of
the task, after RULER's needles with many keys:

- `single`: each key has one value;
- `multi_value`: each key has several values, in sentences of their own; all are asked for, in order;
- `overwritten`: a share of the keys gets another value later, and the last one counts.

Axes: B rows, N tokens of the prompt, A tokens of the answer.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from condense.utils.choices import check_choice
from condense.utils.text import first_tokens

from .encoding import equally_long, remembering_encoder, unknown_words
from .examples import Example, GeneratedTask, collate, random_length
from .passkey import FILLER, NAMES

Form = Literal["single", "multi_value", "overwritten"]
FORMS: tuple[str, ...] = get_args(Form)

PREAMBLE = "Remember who has what. A question follows."
SENTENCE = " The {key} has {value}."
QUESTIONS = {
    "single": " What does the {key} have? The {key} has",
    "multi_value": " What does the {key} have, first to last? The {key} has",
    "overwritten": " What does the {key} have now? The {key} now has",
}
ASKED = " What does the {key}"  # the part of a question that no model can predict
PLACES = NAMES
OWNERS = [
    "baker", "carpenter", "clerk", "cook", "doctor", "driver", "farmer", "gardener",
    "guard", "hunter", "judge", "mason", "miller", "nurse", "painter", "porter",
    "potter", "sailor", "singer", "smith", "tailor", "teacher", "weaver", "writer",
]  # fmt: skip
VALUES = [
    "bread", "butter", "cheese", "clay", "coal", "coffee", "copper", "cotton",
    "flour", "glass", "gold", "honey", "ink", "iron", "leather", "linen",
    "milk", "oil", "paint", "paper", "rice", "salt", "sand", "silk",
    "silver", "soap", "sugar", "tea", "timber", "wax", "wine", "wool",
]  # fmt: skip
FRAMES = [frame.format(key="", value="") for frame in (SENTENCE, *QUESTIONS.values())]
RECALL_TEXTS = [PREAMBLE, FILLER, *FRAMES, *PLACES, *OWNERS, *VALUES]  # all words of the task


@dataclass(frozen=True)
class Questions:
    """A batch of prompts of one length. `prompt_ids_BN` ends where the answer begins."""

    prompt_ids_BN: torch.Tensor
    answer_ids_BA: torch.Tensor
    answers: list[list[str]]  # the words of each answer
    said_at: list[int]  # where the sentence with the answer, or with its first word, begins in each prompt


# Roles of tokens: a model can predict the token, or it can't, or the token belongs to an answer.
KNOWN, RANDOM, ANSWER = range(3)


class _Row(NamedTuple):
    """A text that ends with its last answer."""

    input_ids: np.ndarray  # [N + A]
    role: np.ndarray  # [N + A]
    words: list[str]  # of the last answer
    said_at: int  # the token where the sentence with its first word begins


class RecallTask(GeneratedTask):
    """Makes texts of an exact number of tokens, with sentences at random places between the filler's sentences."""

    def __init__(
        self,
        tokenizer: Any,
        pairs: int,
        form: str = "single",
        values: int = 2,
        overwritten: float = 0.5,
        questions: int = 1,
        brief: float = 0.0,
    ):
        """Takes the keys of `RecallData`, which describes them. Prompts have `pairs` keys and one question.

        Raises `ValueError` for more pairs or values than there are, and for a tokenizer without the words.
        """
        self.tokenizer, self.pairs, self.form, self.num_questions = tokenizer, pairs, form, questions
        self.num_values, self.overwritten, self.brief = values, overwritten, brief
        check_choice("form", form, FORMS)
        self._encode = remembering_encoder(tokenizer)
        self._check_words()
        places, owners, self.words = (equally_long(self._encode, words) for words in (PLACES, OWNERS, VALUES))
        self.keys = list(map(" ".join, product(places, owners)))
        for name, value, least, most in (
            ("pairs", pairs, 1, len(self.keys)),
            ("values", values, 1, len(self.words)),
            ("overwritten", overwritten, 0, 1),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name}={value}: pass {least} to {most}, which this tokenizer can write.")
        self.preamble = np.array(first_tokens(tokenizer) + tokenizer(PREAMBLE, add_special_tokens=False)["input_ids"])
        filler = [self._encode(f" {sentence}.") for sentence in FILLER.strip().rstrip(".").split(". ")]
        self.filler, self.filler_lengths = np.concatenate(filler), [len(sentence) for sentence in filler]
        key, answer = self.keys[0], self.words[: values if form == "multi_value" else 1]
        question = self._encode(QUESTIONS[form].format(key=key))
        self.stop = np.array(self._encode("."))  # after an answer, before the next question
        self.answer_length = len(self._encode(_space(answer)))
        self.question_length = len(question) + self.answer_length + len(self.stop)
        self.frame_length = len(self.preamble) + len(question) + self.answer_length
        self.brief_saves = len(question) - len(self._encode(ASKED.format(key=key)))  # predictable tokens of a question
        self.least_predictable = len(self.preamble) - 1 + (0 if brief else self.brief_saves)  # tokens without filler
        self.sentence_length = len(self._encode(SENTENCE.format(key=key, value=answer[0])))

    def _check_words(self) -> None:
        words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(RECALL_TEXTS))))
        if unknown := unknown_words(self.tokenizer, words):
            raise ValueError(
                f"the tokenizer does not know {len(unknown)} of {len(words)} words of the recall task, such as "
                f"{unknown[0]!r}: use one with all of condense.training.data.recall.RECALL_TEXTS."
            )

    def length(self, pairs: int, questions: int = 1, brief: int = 0) -> int:
        """Returns the tokens of a text with its answers, without filler; `brief` of the questions are brief."""
        more = (min(questions, pairs) - 1) * self.question_length - brief * self.brief_saves
        return self.frame_length + self._num_sentences(pairs) * self.sentence_length + more

    def _num_sentences(self, pairs: int) -> int:
        more = {"single": 0, "multi_value": (self.num_values - 1) * pairs, "overwritten": self._num_overwritten(pairs)}
        return pairs + more[self.form]

    def _num_overwritten(self, pairs: int) -> int:
        return math.ceil(self.overwritten * pairs)

    def _filler_for(self, background: int) -> int:
        """Returns the tokens of filler that a text needs for `background` labels; the first can't be predicted."""
        lacking = background - self.least_predictable
        return lacking + 1 if lacking > 0 else 0

    def check_length(self, num_tokens: int, background: int = 0) -> None:
        """Raises `ValueError` if a text with all pairs, one question and `background` labels needs more tokens."""
        filler = self._filler_for(background)
        needed = self.length(self.pairs) + filler
        if needed > num_tokens:
            most = self._most_pairs(num_tokens - filler)
            labelled = f" with background={background}" if filler else ""
            remedy = f"allow more, or set pairs={most} or less" if most else "allow more"
            raise ValueError(
                f"pairs={self.pairs} of the form {self.form}{labelled} need {needed} tokens and {num_tokens} "
                f"are allowed: {remedy}."
            )

    def _most_pairs(self, room: int) -> int:
        return next((pairs for pairs in range(self.pairs, 0, -1) if self.length(pairs) <= room), 0)

    def batch(self, num_rows: int, num_tokens: int, generator: np.random.Generator) -> Questions:
        """Returns prompts with exactly `pairs` keys, and answers: exactly `num_tokens` tokens together.

        `length(pairs)` tokens leave no room for filler. Raises `ValueError` if the pairs do not fit.
        """
        self.check_length(num_tokens)
        rows = [self._row(self.pairs, num_tokens, generator, [False]) for _ in range(num_rows)]
        ids_BT = torch.from_numpy(np.stack([row.input_ids for row in rows]))
        prompt_ids_BN, answer_ids_BA = ids_BT.tensor_split([num_tokens - self.answer_length], dim=1)
        return Questions(prompt_ids_BN, answer_ids_BA, [row.words for row in rows], [row.said_at for row in rows])

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels` [B, `num_tokens`]: the answers' tokens, and `background` tokens before them.

        A row has 1 to `pairs` keys, or fewer if there is no room, all equally likely. The background excludes sentences
        with keys and questions up to their keys, which are random. Raises `ValueError` without room for one key.
        """
        drawn = (self._draw(num_tokens, background, generator) for _ in range(num_rows))
        rows = [self._row(pairs, num_tokens, generator, is_brief) for pairs, is_brief in drawn]
        return collate([_example(row, background, generator) for row in rows])

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        self.check_length(total_length, background)
        pairs, is_brief = self._draw(total_length, background, generator)
        least = self.length(pairs, len(is_brief), sum(is_brief)) + self._filler_for(background)
        num_tokens = random_length(least, shortest, total_length, generator)
        return _example(self._row(pairs, num_tokens, generator, is_brief), background, generator)

    def _draw(self, num_tokens: int, background: int, generator: np.random.Generator) -> tuple[int, list[bool]]:
        """Returns the number of keys of a text to train on, and for each of its questions whether it is brief."""
        room = num_tokens - self._filler_for(background)
        most = self._most_pairs(room)
        if not most:
            self.check_length(num_tokens, background)
        pairs = int(generator.integers(1, most + 1))
        is_brief = [self.brief > 0 and generator.random() < self.brief for _ in range(min(self.num_questions, pairs))]
        while len(is_brief) > 1 and self.length(pairs, len(is_brief), sum(is_brief)) > room:
            is_brief.pop()
        return pairs, is_brief

    def _row(self, pairs: int, num_tokens: int, generator: np.random.Generator, is_brief: Sequence[bool]) -> _Row:
        counts = np.full(pairs, self.num_values if self.form == "multi_value" else 1)
        if self.form == "overwritten":
            counts[: self._num_overwritten(pairs)] = 2  # the keys are in no order
        keys = [self.keys[number] for number in generator.choice(len(self.keys), pairs, replace=False)]
        values = [generator.choice(self.words, count, replace=False).tolist() for count in counts]
        order, said = generator.permutation(np.repeat(np.arange(pairs), counts)), [iter(of_key) for of_key in values]
        sentences = [self._encode(SENTENCE.format(key=keys[which], value=next(said[which]))) for which in order]
        pieces = [(self.preamble, KNOWN)]
        pieces += self._between(sentences, num_tokens - self.length(pairs, len(is_brief), sum(is_brief)), generator)
        starts = len(self.preamble) + np.cumsum([len(ids) for ids, _ in pieces[1:]])[1::2]  # of sentences
        tail, words = KNOWN, list[str]()  # after an answer, nothing is background
        for asked, brief in zip(generator.choice(pairs, len(is_brief), replace=False), is_brief, strict=True):
            if words:
                pieces.append((self.stop, RANDOM))
            question = np.array(self._encode(QUESTIONS[self.form].format(key=keys[asked])))
            surprise = len(self._encode(ASKED.format(key=keys[asked])))
            words = values[asked] if self.form == "multi_value" else values[asked][-1:]
            answer = np.array(self._encode(_space(words)))
            pieces.append((question[:surprise], RANDOM))
            if not brief:
                pieces.append((question[surprise:], tail))
            pieces.append((answer, ANSWER))
            tail = RANDOM
        ids = np.concatenate([ids for ids, _ in pieces])
        if len(ids) != num_tokens or len(answer) != self.answer_length:
            raise ValueError("this tokenizer splits sentences of equally long words into unequal numbers of tokens.")
        role = np.repeat([role for _, role in pieces], [len(ids) for ids, _ in pieces])
        role[0] = RANDOM  # nothing comes before it
        number = np.flatnonzero(order == asked)[0 if self.form == "multi_value" else -1]
        return _Row(ids, role, words, int(starts[number]))

    def _between(
        self, sentences: list[list[int]], room: int, generator: np.random.Generator
    ) -> list[tuple[np.ndarray, int]]:
        """Returns the sentences, each in a random gap of `room` tokens of filler, and the filler between them.

        The filler's first sentence is cut to fit exactly. Sentences in the same gap keep their order.
        """
        repeats = -(-room // len(self.filler))
        filler = np.tile(self.filler, repeats)[repeats * len(self.filler) - room :]
        ends = np.cumsum(np.tile(self.filler_lengths, repeats)) - repeats * len(self.filler) + room
        gaps = np.append(0, ends[ends > 0])
        places = np.sort(gaps[generator.integers(0, len(gaps), len(sentences))])
        first, *others = np.split(filler, places)
        pieces = [(first[:1], RANDOM), (first[1:], KNOWN)]  # where the filler is cut is random
        for ids, after in zip(sentences, others, strict=True):
            pieces += [(np.array(ids), RANDOM), (after, KNOWN)]
        return pieces


def _space(words: list[str]) -> str:
    return "".join(f" {word}" for word in words)


def _example(row: _Row, background: int, generator: np.random.Generator) -> Example:
    """Gives labels to the answers, and to `background` tokens that can be predicted."""
    known = np.flatnonzero(row.role == KNOWN)
    assert background <= len(known)
    labelled = np.append(generator.choice(known, background, replace=False), np.flatnonzero(row.role == ANSWER))
    return Example.with_labels_at(labelled, row.input_ids)
