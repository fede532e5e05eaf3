"""Facts hidden in other text, and questions at its end: texts of exact lengths, as tokens.

Axes: B rows, N tokens.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.text import first_tokens

from .background import Background, sentences_of
from .encoding import remembering_encoder
from .examples import Example, GeneratedTask, collate
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

LONGEST_DISTRACTOR = 40  # tokens


class Prompt(NamedTuple):
    """Tokens [N] that end where the answer begins, where they are background [N], not facts or question, whether
    `guess` finds the answer, and the tokens of the other candidates."""

    input_ids: np.ndarray
    is_background: np.ndarray
    answer: list[int]
    is_guessed: bool
    others: list[list[int]]


class _Piece(NamedTuple):
    """Insertions between sentences: a fact, a distractor, or an early question with the first token of its answer."""

    tokens: list[int]
    answer: int | None = None


class _Frame(NamedTuple):
    """A text without its background, as tokens. Of `num_places` random places in order, the pieces stand at those
    numbered `places`. `end` are the questions with all answers but the last one, and `is_answer` says which of its
    tokens are answers'."""

    pieces: list[_Piece]
    places: list[int]
    num_places: int
    end: list[int]
    is_answer: list[bool]
    answer: list[int]
    length: int  # with the first token, without the last answer


def _with_distractors(frame: _Frame, distractors: Sequence[list[int]], generator: np.random.Generator) -> _Frame:
    """They stand at places of their own between the others."""
    if not distractors:  # no random numbers are needed
        return frame
    num_places = frame.num_places + len(distractors)
    taken = set(generator.permutation(num_places)[: len(distractors)].tolist())
    free = [place for place in range(num_places) if place not in taken]
    placed = list(zip([free[place] for place in frame.places], frame.pieces, strict=True))
    placed += zip(taken, map(_Piece, distractors), strict=True)
    placed.sort(key=itemgetter(0))
    return frame._replace(
        pieces=[piece for _, piece in placed],
        places=[place for place, _ in placed],
        num_places=num_places,
        length=frame.length + sum(map(len, distractors)),
    )


class _Early(NamedTuple):
    """The places of the facts among `num_places` for facts and early questions, and the questions that come after the
    last fact, each with whether it is brief."""

    fact_places: list[int]
    num_places: int
    questions: list[tuple[Question, bool]]


class FactsTask(GeneratedTask):
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
        self._encode = remembering_encoder(tokenizer, before=" ")
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
        early = self._early_questions(story, 0, generator)
        frame = self._frame(story, [(story.questions[0], False)], early)
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
        return collate(
            [self._text(self._draw(room, generator), num_tokens, background, generator) for _ in range(num_rows)]
        )

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
        asked = [(question, self.brief > 0 and generator.random() < self.brief) for question in questions]
        early = self._early_questions(story, self.early_questions, generator)
        distractors = self._distractors(generator)
        while True:
            frame = _with_distractors(self._frame(story, asked, early), distractors, generator)
            added = early.questions or distractors
            if frame.length + len(frame.answer) <= room or (len(asked) == 1 and not added):
                return frame
            if distractors:
                distractors = distractors[1:]
            elif early.questions:
                early = early._replace(questions=early.questions[1:])
            else:
                asked = asked[:-1]

    def _distractors(self, generator: np.random.Generator) -> list[list[int]]:
        if not self.distractors:  # no random numbers are needed
            return []
        number = int(generator.integers(self.num_distractors + 1))
        return [self.distractors[int(one)] for one in generator.integers(len(self.distractors), size=number)]

    def _early_questions(self, story: Story, number: int, generator: np.random.Generator) -> _Early:
        num_facts = len(story.facts)
        if not number:  # no random numbers are needed
            return _Early(list(range(num_facts)), num_facts, [])
        num_places = num_facts + number
        fact_places = sorted(generator.permutation(num_places)[:num_facts].tolist())
        questions = [
            (story.questions[int(generator.integers(len(story.questions)))], bool(generator.random() < self.brief))
            for _ in range(num_places - 1 - fact_places[-1])
        ]
        return _Early(fact_places, num_places, questions)

    def _question(self, question: Question, brief: bool) -> list[int]:
        return self._encode(question.text.rstrip("?") if brief else QUESTION.format(question=question.text))

    def _frame(self, story: Story, questions: Sequence[tuple[Question, bool]], early: _Early) -> _Frame:
        """`questions` are those at the end, each with whether it is brief."""
        end, is_answer, answer = list[int](), list[bool](), list[int]()
        for question, brief in questions:
            asked = self._question(question, brief)
            end += [*answer, *asked]
            is_answer += [True] * len(answer) + [False] * len(asked)
            answer = self._encode(question.answer)
        pieces = [_Piece(self._encode(fact)) for fact in story.facts]
        pieces += [_Piece(self._question(one, brief), self._encode(one.answer)[0]) for one, brief in early.questions]
        places = [*early.fact_places, *range(early.num_places - len(early.questions), early.num_places)]
        length = len(self.start) + sum(len(piece.tokens) for piece in pieces) + len(end)
        return _Frame(pieces, places, early.num_places, end, is_answer, answer, length)

    def _fill(
        self, frame: _Frame, num_tokens: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The text [N], where it is background [N], and the ends of its pieces: the numbers of the next tokens."""
        tokens, places = self.background.part(num_tokens - frame.length, frame.num_places, generator)
        parts: list[Sequence[int] | np.ndarray] = [self.start]
        inserted = [*(piece.tokens for piece in frame.pieces), frame.end]
        for between, piece in zip(np.split(tokens, places[frame.places]), inserted, strict=True):
            parts += [between, piece]
        lengths = [len(part) for part in parts]
        is_background = np.repeat(np.arange(len(parts)) % 2 == 1, lengths)
        input_ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return input_ids, is_background, np.cumsum(lengths)[2:-1:2]

    def _text(self, frame: _Frame, num_tokens: int, background: int, generator: np.random.Generator) -> Example:
        prompt_ids, is_background, ends = self._fill(frame, num_tokens - len(frame.answer), generator)
        input_ids = np.concatenate([prompt_ids, frame.answer])
        predicted = np.flatnonzero(is_background[1:]) + 1  # nothing comes before the first token
        answers = np.flatnonzero(frame.is_answer) + len(prompt_ids) - len(frame.end)
        labelled = [*generator.choice(predicted, background, replace=False), *answers]
        labelled += range(len(prompt_ids), num_tokens)
        example = Example.with_labels_at(labelled, input_ids)
        for end, piece in zip(ends, frame.pieces, strict=True):
            if piece.answer is not None:
                example.labels[end] = piece.answer
        return example
