"""Facts hidden in other text, and questions at its end: texts of exact lengths, as tokens.

Axes: B rows, N tokens.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.utils.text import first_tokens

from .background import Background, sentences_of
from .encoding import remembering_encoder, unknown_words
from .examples import Example, GeneratedTask, collate, random_length
from .fact_kinds import ANSWERS, KINDS, QUESTION, Question, Story, all_texts, candidates, check_kinds, most_tokens, tell
from .passkey import FILLER

LONGEST_DISTRACTOR = 40  # tokens


class Prompt(NamedTuple):
    """A prompt that ends where the answer begins."""

    input_ids: np.ndarray  # [N]
    is_background: np.ndarray  # [N]: neither facts nor question
    answer: list[int]
    is_guessed: bool  # by `guess`
    others: list[list[int]]  # tokens of the other candidates


class _Piece(NamedTuple):
    """An insertion between sentences: a fact, a distractor, or an early question with its answer's first token."""

    tokens: list[int]
    answer: int | None = None


Places = Sequence[_Piece | None]  # random places in order; None: nothing stands there


class _Frame(NamedTuple):
    """A text without its background, as tokens: insertions, and at the end the questions with their answers."""

    places: Places
    end: list[int]  # the questions, with all answers except the last one
    is_answer: list[bool]  # the tokens of `end` that belong to answers
    answer: list[int]
    length: int  # with the first token, without the last answer


def _with_distractors(places: Places, distractors: Sequence[list[int]], generator: np.random.Generator) -> Places:
    if not distractors:  # no random numbers are needed
        return places
    num_places, others = len(places) + len(distractors), iter(places)
    taken = set(generator.permutation(num_places)[: len(distractors)].tolist())
    added = dict(zip(taken, map(_Piece, distractors), strict=True))
    return [added[number] if number in added else next(others) for number in range(num_places)]


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
        """Takes the keys of `FactsData`, which describes them, and the sentences of the background.

        Without `sentences`, the background is the passkey task's filler. Prompts have one question, which is not brief,
        and neither early questions nor distractors. Raises `ValueError` for unknown kinds, too few facts, a tokenizer
        without the words of the facts, no sentences, and if no sentence can be one of the `distractors`.
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
        fact, question = most_tokens(lambda text: len(self._encode(text)))
        self.longest_frame = len(self.start) + facts * fact + question

    def _check_words(self) -> None:
        missing = unknown_words(self.tokenizer, list(dict.fromkeys(" ".join(all_texts()).split())))
        if missing:
            some = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise ValueError(
                f"the tokenizer does not know {len(missing)} words of the facts ({some}): use one that has all of "
                "condense.training.data.fact_kinds.all_texts(), such as the one that `condense sample facts` makes."
            )

    def check_fits(self, num_tokens: int, background: int = 0) -> None:
        """Raises `ValueError` if a text with one question, its answer and `background` more tokens may not fit."""
        needed = self.longest_frame + self.longest_answer + self._least_background(background)
        if needed > num_tokens:
            raise ValueError(
                f"{self.facts} facts with their question, the answer and {background} tokens of background need up to "
                f"{needed} tokens, and {num_tokens} are allowed: allow more, or fewer facts."
            )

    def _least_background(self, background: int) -> int:
        """Returns the tokens that `background` labels need: nothing predicts the first token of a text."""
        return background + (not self.start)

    def prompt(self, kind: str, num_tokens: int, generator: np.random.Generator) -> Prompt:
        """Returns a prompt with one question. It leaves room for the longest answer: all prompts are equally long."""
        self.check_fits(num_tokens)
        story = tell(kind, self.facts, generator)
        frame = self._frame(self._places(story, 0, generator), [(story.questions[0], False)])
        input_ids, is_background, _ = self._fill(frame, num_tokens - self.longest_answer, generator)
        last, *others = candidates(story)
        is_guessed = last == story.questions[0].answer
        return Prompt(input_ids, is_background, frame.answer, is_guessed, list(map(self._encode, others)))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.background.tokens.tobytes()).hexdigest()

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels` [B, `num_tokens`]: the answers' tokens, and `background` others in each row.

        Facts and questions are random and have no labels.
        """
        self.check_fits(num_tokens, background)
        room = num_tokens - self._least_background(background)
        rows = [self._text(self._draw(room, generator), num_tokens, background, generator) for _ in range(num_rows)]
        return collate(rows)

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        self.check_fits(total_length, background)
        least_background = self._least_background(background)
        frame = self._draw(total_length - least_background, generator)
        least = frame.length + len(frame.answer) + least_background
        return self._text(frame, random_length(least, shortest, total_length, generator), background, generator)

    def _draw(self, room: int, generator: np.random.Generator) -> _Frame:
        """Returns the frame of a random text to train on, of at most `room` tokens with its last answer."""
        story = tell(self.kinds[int(generator.integers(len(self.kinds)))], self.facts, generator)
        questions = story.questions[:1]
        if self.questions > 1:  # one question needs no random numbers
            others = [story.questions[1:][number] for number in generator.permutation(len(story.questions) - 1)]
            questions += others[: self.questions - 1]
        asked = [(question, self.brief > 0 and generator.random() < self.brief) for question in questions]
        places = self._places(story, self.early_questions, generator)
        distractors = self._distractors(generator)
        while True:
            frame = self._frame(_with_distractors(places, distractors, generator), asked)
            if frame.length + len(frame.answer) <= room:
                return frame
            if distractors:
                distractors = distractors[1:]
            elif early := [number for number, piece in enumerate(places) if piece and piece.answer is not None]:
                places[early[0]] = None
            elif len(asked) > 1:
                asked = asked[:-1]
            else:
                return frame

    def _distractors(self, generator: np.random.Generator) -> list[list[int]]:
        if not self.distractors:  # no random numbers are needed
            return []
        number = int(generator.integers(self.num_distractors + 1))
        return [self.distractors[int(one)] for one in generator.integers(len(self.distractors), size=number)]

    def _places(self, story: Story, num_early: int, generator: np.random.Generator) -> list[_Piece | None]:
        """Returns places for facts in order and early questions; None for early questions before the last fact."""
        facts = [_Piece(self._encode(fact)) for fact in story.facts]
        if not num_early:  # no random numbers are needed
            return [*facts]
        places: list[_Piece | None] = [None] * (len(facts) + num_early)
        last = -1
        for last, fact in zip(sorted(generator.permutation(len(places))[: len(facts)].tolist()), facts, strict=True):
            places[last] = fact
        for number in range(last + 1, len(places)):
            question = story.questions[int(generator.integers(len(story.questions)))]
            tokens = self._question(question, bool(generator.random() < self.brief))
            places[number] = _Piece(tokens, self._encode(question.answer)[0])
        return places

    def _question(self, question: Question, brief: bool) -> list[int]:
        return self._encode(question.text.rstrip("?") if brief else QUESTION.format(question=question.text))

    def _frame(self, places: Places, questions: Sequence[tuple[Question, bool]]) -> _Frame:
        """Adds the questions at the end, each with whether it is brief."""
        end, is_answer, answer = list[int](), list[bool](), list[int]()
        for question, brief in questions:
            asked = self._question(question, brief)
            end += [*answer, *asked]
            is_answer += [True] * len(answer) + [False] * len(asked)
            answer = self._encode(question.answer)
        length = len(self.start) + sum(len(piece.tokens) for piece in places if piece) + len(end)
        return _Frame(places, end, is_answer, answer, length)

    def _fill(
        self, frame: _Frame, num_tokens: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the text [N], whether each token is background [N], and the number of the token after each piece."""
        tokens, gaps = self.background.part(num_tokens - frame.length, len(frame.places), generator)
        placed = [(gap, piece.tokens) for gap, piece in zip(gaps, frame.places, strict=True) if piece]
        parts: list[Sequence[int] | np.ndarray] = [self.start]
        inserted = [*(piece for _, piece in placed), frame.end]
        for between, piece in zip(np.split(tokens, [gap for gap, _ in placed]), inserted, strict=True):
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
        for end, piece in zip(ends, filter(None, frame.places), strict=True):
            if piece.answer is not None and end not in labelled:  # the background has as many labels as asked for
                example.labels[end] = piece.answer
        return example
