"""The recall task: who has what, said in single sentences between irrelevant ones, and one of them asked about.

It measures how much a memory holds. A sentence costs six tokens where each word is one: two words that name a key, one
word that is its value, and three more. A value is a word and no number, since tokenizers may cut numbers into digits:
one token then carries five bits, and an answer is one token. Forms of the task, after RULER's needles with many keys:

- `single`: each key has one value;
- `multi_value`: each key has several values, in sentences of their own, and all are asked for, in their order;
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

from condense.text import first_tokens

from .encoding import equally_long, remembering_encoder
from .examples import Example, GeneratedTask, collate
from .passkey import FILLER, NAMES

Form = Literal["single", "multi_value", "overwritten"]
FORMS: tuple[str, ...] = get_args(Form)

PREAMBLE = "Remember who has what. A question follows."
SENTENCE = " The {place} {owner} has {value}."
QUESTIONS = {
    "single": " What does the {place} {owner} have? The {place} {owner} has",
    "multi_value": " What does the {place} {owner} have, first to last? The {place} {owner} has",
    "overwritten": " What does the {place} {owner} have now? The {place} {owner} now has",
}
ASKED = " What does the {place} {owner}"  # what no model can predict of a question
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
FRAMES = [frame.format(place="", owner="", value="") for frame in (SENTENCE, *QUESTIONS.values())]
RECALL_TEXTS = [PREAMBLE, FILLER, *FRAMES, *PLACES, *OWNERS, *VALUES]  # all words of the task


@dataclass(frozen=True)
class Questions:
    """A batch of prompts of one length. `prompt_ids_BN` ends where the answer begins."""

    prompt_ids_BN: torch.Tensor
    answer_ids_BA: torch.Tensor
    answers: list[list[str]]  # the words of each answer
    said_at: list[int]  # where the sentence with the answer begins in each prompt: of several values that of the first


# Roles of tokens: a model can know what comes next, or it can't, or the token belongs to an answer.
KNOWN, RANDOM, ANSWER = range(3)


class _Row(NamedTuple):
    """A text that ends with its last answer: token ids and roles [N + A], the words of that answer, and the token where
    the sentence with its first word begins."""

    input_ids: np.ndarray
    role: np.ndarray
    words: list[str]
    said_at: int


class RecallTask(GeneratedTask):
    """Makes texts of exactly a given number of tokens with sentences at random places between those of the filler."""

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
        """`pairs` are the keys in a text, at most in a text to train on; a key counts once, also with the `values` of
        the form `multi_value`. In the form `overwritten` this share of the keys, rounded up, has another value later.
        `questions` are those of a text to train on, each about another key, or as many as it has keys and room for.
        `brief` is the share of them that end at the key, which the answer directly follows.

        Raises `ValueError` for more pairs or values than there are, and for a tokenizer without the words.
        """
        self.tokenizer, self.pairs, self.form, self.num_questions = tokenizer, pairs, form, questions
        self.num_values, self.overwritten, self.brief = values, overwritten, brief
        if form not in FORMS:
            raise ValueError(f"there is no form={form!r}: choose from {', '.join(FORMS)}.")
        self._encode = remembering_encoder(tokenizer)
        self._check_words()
        places, owners, self.words = (equally_long(self._encode, words) for words in (PLACES, OWNERS, VALUES))
        self.keys = list(product(places, owners))
        if not 1 <= pairs <= len(self.keys):
            raise ValueError(f"pairs={pairs}, and there are keys for 1 to {len(self.keys)} with this tokenizer.")
        if not 1 <= values <= len(self.words):
            raise ValueError(f"values={values}, and a key can have 1 to {len(self.words)} with this tokenizer.")
        if not 0 <= overwritten <= 1:
            raise ValueError(f"overwritten={overwritten} is not a share of the keys: pass 0 to 1.")
        self.preamble = np.array(first_tokens(tokenizer) + tokenizer(PREAMBLE, add_special_tokens=False)["input_ids"])
        filler = [self._encode(f" {sentence}.") for sentence in FILLER.strip().rstrip(".").split(". ")]
        self.filler, self.filler_lengths = np.concatenate(filler), [len(sentence) for sentence in filler]
        (place, owner), answer = self.keys[0], self.words[: values if form == "multi_value" else 1]
        question = self._encode(QUESTIONS[form].format(place=place, owner=owner))
        self.stop = np.array(self._encode("."))  # after an answer, before the next question
        self.answer_length = len(self._encode(_spaced(answer)))
        self.question_length = len(question) + self.answer_length + len(self.stop)
        self.frame_length = len(self.preamble) + len(question) + self.answer_length
        asked = len(self._encode(ASKED.format(place=place, owner=owner)))
        self.brief_saves = len(question) - asked  # tokens of a question that can be predicted
        known_of_question = 0 if brief else self.brief_saves
        self.least_predictable = len(self.preamble) - 1 + known_of_question  # tokens of a text without filler
        self.sentence_length = len(self._encode(SENTENCE.format(place=place, owner=owner, value=answer[0])))

    def _check_words(self) -> None:
        words = {word for text in RECALL_TEXTS for word in re.findall(r"\w+|[^\w\s]", text)}
        unknown = [word for word in sorted(words) if self.tokenizer.unk_token_id in self._encode(" " + word)]
        if unknown:
            raise ValueError(
                f"the tokenizer does not know {len(unknown)} of {len(words)} words of the recall task, such as "
                f"{unknown[0]!r}: use one with all of condense.training.data.recall.RECALL_TEXTS."
            )

    def length(self, pairs: int, questions: int = 1, brief: int = 0) -> int:
        """Tokens of a text with so many keys and questions, `brief` of them brief, without filler; with answers."""
        more = (min(questions, pairs) - 1) * self.question_length - brief * self.brief_saves
        return self.frame_length + self._num_sentences(pairs) * self.sentence_length + more

    def _num_sentences(self, pairs: int) -> int:
        more = {"single": 0, "multi_value": (self.num_values - 1) * pairs, "overwritten": self._num_overwritten(pairs)}
        return pairs + more[self.form]

    def _num_overwritten(self, pairs: int) -> int:
        return math.ceil(self.overwritten * pairs)

    def _filler_for(self, background: int) -> int:
        """Tokens of filler that a text needs for `background` labels; the first one can't be predicted."""
        lacking = background - self.least_predictable
        return lacking + 1 if lacking > 0 else 0

    def check_length(self, num_tokens: int, background: int = 0) -> None:
        """Raises `ValueError` where a text with all pairs, one question and `background` labels needs more tokens."""
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
        """Prompts with exactly `pairs` keys and with answers, of together exactly `num_tokens` tokens.

        `length(pairs)` tokens leave no filler. Raises `ValueError` where the pairs do not fit.
        """
        self.check_length(num_tokens)
        rows = [self._row(self.pairs, num_tokens, generator, [False]) for _ in range(num_rows)]
        ids_BT = torch.from_numpy(np.stack([row.input_ids for row in rows]))
        prompt_ids_BN, answer_ids_BA = ids_BT.tensor_split([num_tokens - self.answer_length], dim=1)
        return Questions(prompt_ids_BN, answer_ids_BA, [row.words for row in rows], [row.said_at for row in rows])

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` [B, num_tokens]: the answers' tokens, and `background` tokens before them in a row.

        A row has 1 to `pairs` keys, or to the most that it has room for, all equally likely. The background excludes
        the sentences with keys and the question up to its key, which are random. Raises `ValueError` where a text has
        no room for one key.
        """
        rows = [self._training_row(num_tokens, background, generator) for _ in range(num_rows)]
        return collate([_example(row, background, generator) for row in rows])

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        """A text with its answers and labels as in a training batch, of any length from `shortest` of the total on.

        Raises `ValueError` where all pairs do not fit into `total_length` tokens.
        """
        self.check_length(total_length, background)
        pairs, filler = int(generator.integers(1, self.pairs + 1)), self._filler_for(background)
        is_brief = self._draw_questions(pairs, total_length - filler, generator)
        least = max(self.length(pairs, len(is_brief), sum(is_brief)) + filler, math.ceil(shortest * total_length))
        row = self._row(pairs, int(generator.integers(least, total_length + 1)), generator, is_brief)
        return _example(row, background, generator)

    def _training_row(self, num_tokens: int, background: int, generator: np.random.Generator) -> _Row:
        room = num_tokens - self._filler_for(background)
        most = self._most_pairs(room)
        if not most:
            self.check_length(num_tokens, background)
        pairs = int(generator.integers(1, most + 1))
        return self._row(pairs, num_tokens, generator, self._draw_questions(pairs, room, generator))

    def _draw_questions(self, pairs: int, room: int, generator: np.random.Generator) -> list[bool]:
        """Draws for each question of a training text whether it is brief; no more than there are keys and room for."""
        is_brief = [self.brief > 0 and generator.random() < self.brief for _ in range(min(self.num_questions, pairs))]
        while len(is_brief) > 1 and self.length(pairs, len(is_brief), sum(is_brief)) > room:
            is_brief.pop()
        return is_brief

    def _row(self, pairs: int, num_tokens: int, generator: np.random.Generator, is_brief: Sequence[bool]) -> _Row:
        counts = np.full(pairs, self.num_values if self.form == "multi_value" else 1)
        if self.form == "overwritten":
            counts[: self._num_overwritten(pairs)] = 2  # the keys are in no order
        keys = [self.keys[number] for number in generator.choice(len(self.keys), pairs, replace=False)]
        values = [generator.choice(self.words, count, replace=False).tolist() for count in counts]
        sentences, said = list[list[int]](), [iter(of_key) for of_key in values]
        order = generator.permutation(np.repeat(np.arange(pairs), counts))
        for which in order:
            place, owner = keys[which]
            sentences.append(self._encode(SENTENCE.format(place=place, owner=owner, value=next(said[which]))))
        pieces = [(self.preamble, KNOWN)]
        pieces += self._between(sentences, num_tokens - self.length(pairs, len(is_brief), sum(is_brief)), generator)
        starts = len(self.preamble) + np.cumsum([len(ids) for ids, _ in pieces[1:]])[1::2]  # of sentences
        tail, words = KNOWN, list[str]()  # after an answer, nothing is background
        for asked, brief in zip(generator.choice(pairs, len(is_brief), replace=False), is_brief, strict=True):
            if words:
                pieces.append((self.stop, RANDOM))
            place, owner = keys[asked]
            question = np.array(self._encode(QUESTIONS[self.form].format(place=place, owner=owner)))
            surprise = len(self._encode(ASKED.format(place=place, owner=owner)))
            words = values[asked] if self.form == "multi_value" else values[asked][-1:]
            answer = np.array(self._encode(_spaced(words)))
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
        """The sentences, each in a gap of `room` tokens of filler, whose first sentence is cut to fit exactly.

        Those that meet in one gap keep their order.
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


def _spaced(words: list[str]) -> str:
    return "".join(f" {word}" for word in words)


def _example(row: _Row, background: int, generator: np.random.Generator) -> Example:
    """Labels are those of the answers, and of `background` tokens that can be known."""
    known = np.flatnonzero(row.role == KNOWN)
    assert background <= len(known)
    labelled = np.append(generator.choice(known, background, replace=False), np.flatnonzero(row.role == ANSWER))
    return Example.with_labels_at(labelled, row.input_ids)
