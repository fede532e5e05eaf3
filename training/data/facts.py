"""Facts hidden in other text, and questions at its end: texts of exact lengths, as tokens.

Axes: B rows, N tokens.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.text import first_tokens

from .background import Background, sentences_of
from .encoding import encode_within
from .examples import IGNORE_INDEX, Example
from .fact_kinds import (
    ANSWERS,
    KINDS,
    QUESTION,
    QUESTIONS,
    TEMPLATES,
    WORDS,
    Question,
    Story,
    all_texts,
    candidates,
    check_kinds,
    tell,
)  # fmt: skip
from .passkey import FILLER

ENCODED_TEXTS = 2**16  # kept: more than there are sentences of facts
LONGEST_DISTRACTOR = 40  # tokens


class Prompt(NamedTuple):
    """Tokens [N] that end where the answer begins, where they are background [N], not facts or question, whether
    `guess` finds the answer, and the tokens of the other candidates."""

    input_ids: np.ndarray
    is_background: np.ndarray
    answer: list[int]
    is_guessed: bool
    others: list[list[int]]


class _Frame(NamedTuple):
    """A text without its background, as tokens. `inserted` are facts, distractors and early questions in their order;
    of `num_places` random places in order they stand at those numbered `places`. `early_answers` are the first tokens
    of the answers, by the numbers of the inserted questions. `end` are the questions with all answers but the last one,
    and `is_answer` says which of its tokens are answers'."""

    inserted: list[list[int]]
    places: list[int]
    num_places: int
    early_answers: dict[int, int]
    end: list[int]
    is_answer: list[bool]
    answer: list[int]
    length: int  # with the first token, without the last answer


def _with_distractors(frame: _Frame, distractors: Sequence[list[int]], generator: np.random.Generator) -> _Frame:
    """They stand at places of their own between the others."""
    num_places = frame.num_places + len(distractors)
    taken = set(generator.permutation(num_places)[: len(distractors)].tolist())
    free = [place for place in range(num_places) if place not in taken]
    answers = [frame.early_answers.get(number) for number in range(len(frame.inserted))]
    pieces = list(zip([free[place] for place in frame.places], frame.inserted, answers, strict=True))
    pieces += [(place, sentence, None) for place, sentence in zip(taken, distractors, strict=True)]
    pieces.sort(key=itemgetter(0))
    return frame._replace(
        inserted=[tokens for _, tokens, _ in pieces],
        places=[place for place, _, _ in pieces],
        num_places=num_places,
        early_answers={number: answer for number, (_, _, answer) in enumerate(pieces) if answer is not None},
        length=frame.length + sum(map(len, distractors)),
    )


class _Early(NamedTuple):
    """The places of the facts among `num_places` for facts and early questions, and the questions that come after the
    last fact, each with whether it is brief."""

    fact_places: list[int]
    num_places: int
    questions: list[tuple[Question, bool]]


class FactsTask:
    """Makes texts of facts, in their order at random places between the sentences of the background."""

    def __init__(
        self,
        tokenizer: Any,
        kinds: Sequence[str] = tuple(KINDS),
        facts: int = 6,
        sentences: Iterable[str] | None = None,
        questions: int = 1,
        brief: float = 0.0,
        early_questions: int = 0,
        distractors: int = 0,
    ):
        """A text has at most `facts` facts. A text to train on has `questions` questions, each about another fact, or
        as many as it has facts and room for; `brief` is the share of them that are asked without "Answer:" and
        punctuation, so that most answers directly follow the word that they are looked up by. `early_questions` more
        stand at random places between sentences, those before the last fact left out; the text goes on without their
        answers, of which the first token is a label. Up to `distractors` sentences of the background that name a
        person, a place or a thing of the facts are added at random places. `sentences` are the background; None: those
        of the passkey task's filler.

        Raises `ValueError` for unknown kinds, for too few facts, for a tokenizer that does not know the words of the
        facts, for no sentences, and for distractors where no sentence is one.
        """
        check_kinds(kinds, facts)
        self.tokenizer, self.kinds, self.facts = tokenizer, kinds, facts
        self.questions, self.brief = min(questions, facts), brief
        self.early_questions, self.num_distractors = early_questions, distractors
        self._encode = lru_cache(ENCODED_TEXTS)(self._tokenize)
        self._check_words()
        self.start = first_tokens(tokenizer)
        self.background = Background(tokenizer, sentences_of(FILLER) if sentences is None else sentences)
        self.distractors = self.background.naming(ANSWERS, LONGEST_DISTRACTOR) if distractors else []
        if distractors and not self.distractors:
            raise ValueError(
                f"distractors={distractors}: no sentence of the background with at most {LONGEST_DISTRACTOR} tokens "
                f"has a word such as {ANSWERS[0]!r} or {ANSWERS[-1]!r}; pass other text, or leave distractors out."
            )
        self.longest_answer = max(len(self._encode(answer)) for answer in ANSWERS)
        self.longest_frame = self._longest_frame()

    def _tokenize(self, text: str) -> list[int]:
        return encode_within(self.tokenizer, [f" {text}"])[0]

    def _check_words(self) -> None:
        unknown = self.tokenizer.unk_token_id
        words = dict.fromkeys(word for text in all_texts() for word in text.split())
        missing = [word for word in words if unknown is not None and unknown in self._encode(word)]
        if missing:
            some = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise ValueError(
                f"the tokenizer does not know {len(missing)} words of the facts ({some}): use one that has all of "
                "condense.training.data.fact_kinds.all_texts(), such as the one that `condense sample "
                "facts` makes."
            )

    def _longest_frame(self) -> int:
        """The tokens of the longest facts with one question, with the longest words."""
        words = {role: max(options, key=lambda word: len(self._encode(word))) for role, options in WORDS.items()}
        fact = max(len(self._encode(text.format(**words))) for text in TEMPLATES)
        question = max(len(self._encode(QUESTION.format(question=text.format(**words)))) for text in QUESTIONS)
        return len(self.start) + self.facts * fact + question

    def check_fits(self, num_tokens: int, background: int = 0) -> None:
        """Raises `ValueError` where a text with one question, its answer and `background` more tokens may not fit."""
        needed = self.longest_frame + self.longest_answer + self._least_background(background)
        if needed > num_tokens:
            raise ValueError(
                f"{self.facts} facts with their question, the answer and {background} tokens of background need up to "
                f"{needed} tokens, and {num_tokens} are allowed: allow more, or fewer facts."
            )

    def _least_background(self, background: int) -> int:
        """The tokens of background that `background` labels need: nothing predicts the first token of a text."""
        return background + (not self.start)

    def prompt(self, kind: str, num_tokens: int, generator: np.random.Generator) -> Prompt:
        """A prompt with one question of a kind. It leaves room for the longest answer: all prompts are equally long."""
        self.check_fits(num_tokens)
        story = tell(kind, self.facts, generator)
        frame = self._frame(story, story.questions[:1], [False])
        input_ids, is_background, _ = self._fill(frame, num_tokens - self.longest_answer, generator)
        last, *others = candidates(story)
        is_guessed = last == story.questions[0].answer
        return Prompt(input_ids, is_background, frame.answer, is_guessed, list(map(self._encode, others)))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.background.tokens.tobytes()).hexdigest()

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` [B, N], N being `num_tokens`: the answers' tokens, and `background` others a row.

        What facts and questions say is random: they have no labels.
        """
        self.check_fits(num_tokens, background)
        room = num_tokens - self._least_background(background)
        rows = [self._text(self._draw(room, generator), num_tokens, background, generator) for _ in range(num_rows)]
        return {
            "input_ids": torch.from_numpy(np.stack([row.input_ids for row in rows])),
            "labels": torch.from_numpy(np.stack([row.labels for row in rows])),
        }

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        """A text with its answers and labels as in a training batch, of any length from `shortest` of the total on."""
        self.check_fits(total_length, background)
        frame = self._draw(total_length - self._least_background(background), generator)
        least = max(
            frame.length + len(frame.answer) + self._least_background(background), math.ceil(shortest * total_length)
        )
        return self._text(frame, int(generator.integers(least, total_length + 1)), background, generator)

    def _draw(self, room: int, generator: np.random.Generator) -> _Frame:
        """The frame of a random text to train on: of at most `room` tokens with its last answer."""
        story = tell(self.kinds[int(generator.integers(len(self.kinds)))], self.facts, generator)
        questions = story.questions[:1]
        if self.questions > 1:  # one question needs no random numbers
            others = [story.questions[1:][number] for number in generator.permutation(len(story.questions) - 1)]
            questions += others[: self.questions - 1]
        is_brief = [self.brief > 0 and generator.random() < self.brief for _ in questions]
        early = self._early_questions(story, generator)
        distractors = self._distractors(generator)
        while True:
            frame = self._frame(story, questions, is_brief, early, distractors, generator)
            added = early.questions or distractors
            if frame.length + len(frame.answer) <= room or (len(questions) == 1 and not added):
                return frame
            if distractors:
                distractors = distractors[1:]
            elif early.questions:
                early = early._replace(questions=early.questions[1:])
            else:
                questions, is_brief = questions[:-1], is_brief[:-1]

    def _distractors(self, generator: np.random.Generator) -> list[list[int]]:
        if not self.distractors:  # no random numbers are needed
            return []
        number = int(generator.integers(self.num_distractors + 1))
        return [self.distractors[int(one)] for one in generator.integers(len(self.distractors), size=number)]

    def _early_questions(self, story: Story, generator: np.random.Generator) -> _Early:
        num_facts = len(story.facts)
        if not self.early_questions:  # no random numbers are needed
            return _Early(list(range(num_facts)), num_facts, [])
        num_places = num_facts + self.early_questions
        fact_places = sorted(generator.permutation(num_places)[:num_facts].tolist())
        questions = [
            (story.questions[int(generator.integers(len(story.questions)))], bool(generator.random() < self.brief))
            for _ in range(num_places - 1 - fact_places[-1])
        ]
        return _Early(fact_places, num_places, questions)

    def _question(self, question: Question, brief: bool) -> list[int]:
        return self._encode(question.text.rstrip("?") if brief else QUESTION.format(question=question.text))

    def _frame(
        self,
        story: Story,
        questions: Sequence[Question],
        is_brief: Sequence[bool],
        early: _Early | None = None,
        distractors: Sequence[list[int]] = (),
        generator: np.random.Generator | None = None,
    ) -> _Frame:
        """`early` None: a text without early questions. The `generator` draws the places of distractors."""
        end, is_answer, answer = list[int](), list[bool](), list[int]()
        for question, brief in zip(questions, is_brief, strict=True):
            asked = self._question(question, brief)
            end += [*answer, *asked]
            is_answer += [True] * len(answer) + [False] * len(asked)
            answer = self._encode(question.answer)
        inserted = [self._encode(fact) for fact in story.facts]
        num_facts = len(inserted)
        early = early or _Early(list(range(num_facts)), num_facts, [])
        inserted += [self._question(question, brief) for question, brief in early.questions]
        num_early = len(early.questions)
        places = [*early.fact_places, *range(early.num_places - num_early, early.num_places)]
        early_answers = {
            num_facts + number: self._encode(question.answer)[0] for number, (question, _) in enumerate(early.questions)
        }
        length = len(self.start) + sum(map(len, inserted)) + len(end)
        frame = _Frame(inserted, places, early.num_places, early_answers, end, is_answer, answer, length)
        if not distractors:
            return frame
        assert generator is not None
        return _with_distractors(frame, distractors, generator)

    def _fill(
        self, frame: _Frame, num_tokens: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The text [N], where it is background [N], and the ends of what is inserted: the numbers of the tokens that
        follow."""
        tokens, places = self.background.part(num_tokens - frame.length, frame.num_places, generator)
        pieces: list[Sequence[int] | np.ndarray] = [self.start]
        for between, piece in zip(np.split(tokens, places[frame.places]), [*frame.inserted, frame.end], strict=True):
            pieces += [between, piece]
        lengths = [len(piece) for piece in pieces]
        is_background = np.repeat(np.arange(len(pieces)) % 2 == 1, lengths)
        input_ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
        return input_ids, is_background, np.cumsum(lengths)[2:-1:2]

    def _text(self, frame: _Frame, num_tokens: int, background: int, generator: np.random.Generator) -> Example:
        prompt_ids, is_background, ends = self._fill(frame, num_tokens - len(frame.answer), generator)
        input_ids = np.concatenate([prompt_ids, frame.answer])
        predicted = np.flatnonzero(is_background[1:]) + 1  # nothing comes before the first token
        answers = np.flatnonzero(frame.is_answer) + len(prompt_ids) - len(frame.end)
        labelled = [*generator.choice(predicted, background, replace=False), *answers]
        labelled += range(len(prompt_ids), num_tokens)
        labels = np.full(num_tokens, IGNORE_INDEX)
        labels[labelled] = input_ids[labelled]
        labels[ends[list(frame.early_answers)]] = list(frame.early_answers.values())
        return Example(input_ids, labels)
