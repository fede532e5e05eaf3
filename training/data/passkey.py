"""The passkey task: a number hidden in irrelevant text, asked for at the end (appendix C of the paper).

Variants: longer numbers, and several numbers in a text, each belonging to a name, one of which is asked for.

Axes: B rows, N tokens of the prompt, A tokens of the answer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from condense.utils.text import first_tokens

from .encoding import equally_long, remembering_encoder, unknown_words
from .examples import Example, GeneratedTask, collate, random_length

PREAMBLE = (
    "There is a critical piece of information hidden within a large amount of irrelevant text. Your task is to locate "
    "it and remember it carefully. I will test your ability to recall this information.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
FIRST_MENTION = "The passkey{whose} is {key}"
KEY = FIRST_MENTION + ". Remember it carefully. {key} is the passkey{whose}.\n"
FIRST_QUESTION = "What is the passkey{whose}"
QUESTION = FIRST_QUESTION + "? The passkey{whose} is"
ANSWER = " {key}"
WHOSE = " of the {name}"  # nothing if there is one key
NAMES = [
    "river", "house", "garden", "bridge", "tower", "market", "school", "church",
    "station", "island", "valley", "castle", "hotel", "forest", "street", "library",
    "museum", "hospital", "office", "kitchen", "village", "mountain", "temple", "lake",
]  # fmt: skip
PASSKEY_TEXTS = [PREAMBLE, FILLER, KEY.format(whose="", key=""), QUESTION.format(whose="")]


@dataclass(frozen=True)
class Passkeys:
    """A batch of prompts of one length. `prompt_ids_BN` ends where the answer begins."""

    prompt_ids_BN: torch.Tensor
    answer_ids_BA: torch.Tensor
    keys: list[str]  # the requested ones
    sentence_at_B: list[int]  # where the sentence with the requested key begins


class _Frame(NamedTuple):
    """A row without its fillers."""

    fields: list[dict[str, str]]  # of each sentence: its key, and whose it is
    asked: int  # the number of the sentence with the requested key
    sentences: list[list[int]]
    question: list[int]
    answer: list[int]
    length: int  # with the answer


class _Row(NamedTuple):
    prompt: list[int]
    frame: _Frame
    starts: list[int]  # of each sentence, then of the question
    fillers: list[int]  # where each begins


class PasskeyTask(GeneratedTask):
    """Fills prompts up to a length by repeating the filler before, between and after the key sentences."""

    def __init__(
        self,
        tokenizer,
        num_keys: int = 1,
        num_digits: int = 4,
        frame: tuple[list[int], list[int]] | None = None,
        early_questions: int = 0,
    ):
        """`frame`: the tokens before and after the prompt, such as a chat's; None: the tokenizer's first tokens.
        `early_questions` are only in texts to train on, which have up to so many.

        Raises `ValueError` for impossible numbers, and for several keys if the tokenizer does not know their names.
        """
        if num_digits < 1 or not 1 <= num_keys <= 10**num_digits:
            raise ValueError(f"num_keys={num_keys}, num_digits={num_digits}: pass 1 or more, with digits for all keys.")
        self.tokenizer, self.num_keys, self.num_digits = tokenizer, num_keys, num_digits
        self._encode = remembering_encoder(tokenizer)
        before, self.after = (first_tokens(tokenizer), []) if frame is None else frame
        self.preamble = before + tokenizer(PREAMBLE, add_special_tokens=False)["input_ids"]
        self.filler = self._encode(FILLER)
        self.early_questions = early_questions
        self.names = self._usable_names() if num_keys > 1 else []
        some, others = (self._encode(ANSWER.format(key=digit * num_digits)) for digit in "19")
        self.digit_tokens = sum(one != other for one, other in zip(some, others, strict=False))  # of an answer

    def _usable_names(self) -> list[str]:
        if unknown := unknown_words(self.tokenizer, NAMES):
            raise ValueError(
                f"the tokenizer does not know {unknown[0]!r}, a name that several keys need: "
                "use num_keys=1 or a tokenizer with all of condense.training.data.passkey.NAMES."
            )
        names = equally_long(self._encode, NAMES)
        if self.num_keys > len(names):
            raise ValueError(
                f"num_keys={self.num_keys}, and there are names of equally many tokens for {len(names)}: ask for fewer."
            )
        return names

    def batch(
        self,
        num_rows: int,
        num_tokens: int,
        generator: np.random.Generator,
        depth: float | None = None,
        skip: int = 0,
    ) -> Passkeys:
        """Returns prompts with answers, of at most `num_tokens` tokens, filled with whole fillers.

        `depth` 0 puts the requested key before all fillers, and 1 after them. With None it is anywhere with equal
        probability, like all other keys. `skip` draws so many prompts before these, without their texts. Raises
        `ValueError` if the prompt without fillers is too long.
        """
        for _ in range(skip):
            self._draw(num_tokens, generator, depth)
        rows = self._rows(num_rows, num_tokens, generator, depth)
        return Passkeys(
            torch.tensor([row.prompt for row in rows]),
            torch.tensor([row.frame.answer for row in rows]),
            [row.frame.fields[row.frame.asked]["key"] for row in rows],
            [row.starts[row.frame.asked] for row in rows],
        )

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `labels` [B, N + A]: the answer's tokens, and `background` other tokens in each row.

        The background excludes the keys' first mentions and the requested name, which are random.
        """
        rows = self._rows(num_rows, num_tokens, generator, depth=None)
        return collate([self._example(row, background, generator) for row in rows])

    def example(self, total_length: int, shortest: float, background: int, generator: np.random.Generator) -> Example:
        frame = self._frame(total_length, generator)
        least = min(frame.length + self._filler_for(frame, background), total_length)
        num_tokens = random_length(least, shortest, total_length, generator)
        gaps = self._gaps(frame, num_tokens, generator, depth=None)
        return self._example(self._fill(frame, gaps, num_tokens), background, generator)

    def _rows(self, num_rows: int, num_tokens: int, generator: np.random.Generator, depth: float | None) -> list[_Row]:
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(
                f"depth={depth} is outside 0 to 1: 0 is directly after the preamble, 1 before the question."
            )
        rows = [self._fill(*self._draw(num_tokens, generator, depth), num_tokens) for _ in range(num_rows)]
        if len({len(row.prompt) + len(row.frame.answer) for row in rows}) > 1:
            raise ValueError(
                "this tokenizer splits keys of equal length into unequal numbers of tokens: not supported."
            )
        return rows

    def _draw(self, num_tokens: int, generator: np.random.Generator, depth: float | None) -> tuple[_Frame, list[int]]:
        """Returns a prompt's frame, and the number of fillers before each of its keys."""
        frame = self._frame(num_tokens, generator)
        return frame, self._gaps(frame, num_tokens, generator, depth)

    def _frame(self, num_tokens: int, generator: np.random.Generator) -> _Frame:
        keys: list[str] = []
        while len(keys) < self.num_keys:
            key = "".join(map(str, generator.integers(0, 10, self.num_digits)))
            if key not in keys:
                keys.append(key)
        whose = [""]
        if self.num_keys > 1:
            whose = [WHOSE.format(name=name) for name in generator.choice(self.names, self.num_keys, replace=False)]
        asked = int(generator.integers(self.num_keys))
        fields = [{"whose": of, "key": key} for of, key in zip(whose, keys, strict=True)]
        sentences = [self._encode(KEY.format(**field)) for field in fields]
        question, answer = (self._encode(text.format(**fields[asked])) for text in (QUESTION, ANSWER))
        question = question + self.after
        length = len(self.preamble) + sum(map(len, sentences)) + len(question) + len(answer)
        if length > num_tokens:
            raise ValueError(f"a passkey prompt needs {length} tokens and {num_tokens} are allowed: allow more.")
        return _Frame(fields, asked, sentences, question, answer, length)

    def _gaps(self, frame: _Frame, num_tokens: int, generator: np.random.Generator, depth: float | None) -> list[int]:
        fillers = self._num_fillers(frame, num_tokens)
        return [
            int(generator.integers(0, fillers + 1)) if depth is None or which != frame.asked else round(depth * fillers)
            for which in range(self.num_keys)
        ]

    def _num_fillers(self, frame: _Frame, num_tokens: int) -> int:
        return (num_tokens - frame.length) // len(self.filler)

    def _fill(self, frame: _Frame, gaps: list[int], num_tokens: int) -> _Row:
        """Puts each key into its gap between fillers; keys in the same gap keep the order of drawing."""
        fillers = self._num_fillers(frame, num_tokens)
        ids, starts, filler_at, done = list(self.preamble), [0] * self.num_keys, list[int](), 0
        for which in [*sorted(range(self.num_keys), key=gaps.__getitem__), None]:
            more = (fillers if which is None else gaps[which]) - done
            filler_at += range(len(ids), len(ids) + more * len(self.filler), len(self.filler))
            ids += self.filler * more
            if which is not None:
                starts[which], done = len(ids), gaps[which]
                ids += frame.sentences[which]
        return _Row(ids + frame.question, frame, [*starts, len(ids)], filler_at)

    def _surprises(self, frame: _Frame) -> list[int]:
        """Returns how many first tokens of each sentence, and of the question, can't be predicted."""
        firsts = [len(self._encode(FIRST_MENTION.format(**fields))) for fields in frame.fields]
        question = FIRST_QUESTION.format(**frame.fields[frame.asked])
        return [*firsts, len(self._encode(question)) if self.num_keys > 1 else 0]

    def _filler_for(self, frame: _Frame, background: int) -> int:
        """Returns the tokens of whole fillers that `background` labels need; a text's first token has no label."""
        lacking = background - (frame.length - len(frame.answer) - 1 - sum(self._surprises(frame)))
        return max(0, -(-lacking // len(self.filler))) * len(self.filler)

    def _example(self, row: _Row, background: int, generator: np.random.Generator) -> Example:
        """Gives labels to the answer, to one token of each early question, and to `background` tokens that can be
        predicted."""
        input_ids = np.array(row.prompt + row.frame.answer)
        predictable = np.ones(len(row.prompt), dtype=bool)
        predictable[0] = False
        for start, surprise in zip(row.starts, self._surprises(row.frame), strict=True):
            predictable[start : start + surprise] = False
        if background > predictable.sum():
            raise ValueError(
                f"background={background} and the text has {predictable.sum()} tokens that can be predicted: lower it."
            )
        most = (int(predictable.sum()) - background) // len(self.filler)  # early questions can't be predicted
        early = self._ask_early(row, most, input_ids, generator) if self.early_questions else {}
        for start in early:
            predictable[start : start + len(self.filler)] = False
        labelled = [*generator.choice(np.flatnonzero(predictable), background, replace=False)]
        example = Example.with_labels_at([*labelled, *range(len(row.prompt), len(input_ids))], input_ids)
        for at, token in early.values():
            example.labels[at] = token
        return example

    def _ask_early(
        self, row: _Row, most: int, input_ids: np.ndarray, generator: np.random.Generator
    ) -> dict[int, tuple[int, int]]:
        """Writes questions over the beginnings of fillers behind the requested key, each with a part of its answer: the
        tokens before one with a digit, a random one for all. Returns it and its place in the text by the start of a
        filler.

        This digit isn't in the text, which goes on with the filler: no later question can read it there.
        """
        question, answer = row.frame.question, row.frame.answer
        if len(question) + len(answer) > len(self.filler):
            raise ValueError(
                f"early_questions={self.early_questions}: a question with its answer has {len(question) + len(answer)} "
                f"tokens, more than the filler's {len(self.filler)}. Set early_questions=0 or fewer num_digits."
            )
        behind = [start for start in row.fillers if start > row.starts[row.frame.asked]]
        number = int(generator.integers(min(self.early_questions, len(behind), most) + 1))
        said = int(generator.integers(len(answer) - self.digit_tokens, len(answer)))
        piece, early = question + answer[:said], {}
        for start in generator.choice(behind, number, replace=False).tolist() if number else ():
            input_ids[start : start + len(piece)] = piece
            early[start] = (start + len(piece), answer[said])
        return early
