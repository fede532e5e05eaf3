"""Answers to the user's own prompts, by the model's own decoding, from files with prompts and right answers.

Case, kind of white space and Unicode's different ways to write a letter are ignored. The expected answer must stand by
itself, not within a longer word or number.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unicodedata import normalize

import regex

from condense.generation.chat import chat_ids, end_tokens
from condense.training.data.documents import good_documents
from condense.training.data.shards import Problem, open_shards, wrong_encoding
from condense.training.recipe import Source
from condense.utils.fields import MISSING, field_names, find_field
from condense.utils.text import encode

from ..models import EvaluatedModel
from ..overview import Figure
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results
from ..statistics import bootstrap
from .evaluation import (
    Evaluation,
    answer,
    data_of,
    dtype_of,
    figure_of,
    in_percent,
    kibibytes,
    left_out_table,
    shown_name,
)
from .grids import pool
from .options import AnswersOptions

# Scripts without spaces between words. Both kana use the marks of length and voicing, which belong to neither script.
WITHOUT_SPACES = (
    r"[\p{Script=Thai}\p{Script=Lao}\p{Script=Myanmar}\p{Script=Khmer}\p{Script=Han}"
    r"\p{Script_Extensions=Hiragana}\p{Script_Extensions=Katakana}]"
)
WORD = rf"(?!{WITHOUT_SPACES})[\pL\pN_]"  # a character of any other script
MARK = r"(?!\p{Variation_Selector})\pM"  # of the letter before it, such as an accent or a vowel
PATTERNS = {  # [\pL\pN_]: the \w of `regex` includes combining marks
    "exact": r"[^\pL\pN_.+-]*{before}{text}{after}[^\pL\pN_]*",
    "begins": r"{text}{after}.*",
    "contains": r".*?{before}{text}{after}.*",
}
PATTERNS["all"] = PATTERNS["contains"]

RULES = {  # by --match
    "exact": "right is what is the expected answer",
    "begins": "right is what begins with the expected answer",
    "contains": "right is what contains the expected answer",
    "all": "a prompt counts with the share of its expected answers that the answer contains",
}


class Question(NamedTuple):
    """A prompt with its right `answers`; `where` names its file and line."""

    where: str
    prompt: str
    answers: list[str]


class Batch(NamedTuple):
    """A batch of questions for one model, starting at number `first`."""

    model: EvaluatedModel
    first: int
    questions: list[Question]


class Answers(Evaluation[Batch]):
    """A record holds for each of its `prompts` the answer, whether or how far it is right, and the prompt's tokens."""

    kind = "answers"
    unit = "batch"
    Options = AnswersOptions

    def __init__(self, options: AnswersOptions, models: Sequence[EvaluatedModel]):
        super().__init__(options, models)
        self.left_out = Counter[str]()
        records = good_documents(
            read_questions(options),
            options.bad_documents,
            lambda problem: self.left_out.update([problem.kind]),
            "--bad-documents skip",
        )
        found = list(islice(records, options.num_prompts))
        if not found:
            named = ", ".join(options.data)
            raise ValueError(f"data {named} holds no prompt: pass a .jsonl or .parquet file with some.")
        self.questions = sorted(found, key=lambda question: len(question.prompt))  # batches need little padding

    def settings(self) -> dict[str, Any]:
        texts = [[question.prompt, question.answers] for question in self.questions]
        return super().settings() | {"fingerprint": hashlib.sha256(repr(texts).encode()).hexdigest()[:16]}

    def items(self) -> list[Batch]:
        size = self.options.batch_size
        return [
            Batch(model, first, self.questions[first : first + size])
            for model in self.models
            for first in range(0, len(self.questions), size)
        ]

    def num_tokens(self, item: Batch) -> int:
        return max(map(len, self._prompts(item))) + self.options.new_tokens

    def key(self, item: Batch) -> Key:
        return {"model": item.model.name, "first_prompt": item.first}

    def _prompts(self, item: Batch) -> list[list[int]]:
        tokenizer, chat = item.model.tokenizer, item.model.name in self.options.chat
        texts = [question.prompt for question in item.questions]
        return [chat_ids(tokenizer, text) if chat else encode(tokenizer, text)[0].tolist() for text in texts]

    def measure(self, item: Batch) -> Record:
        evaluated, prompts = item.model, self._prompts(item)
        ends = end_tokens(evaluated.model, evaluated.tokenizer, evaluated.name in self.options.chat)
        rows, num_bytes = answer(evaluated, prompts, ends, do_sample=False, max_new_tokens=self.options.new_tokens)
        found = []
        for prompt, question, written in zip(prompts, item.questions, rows, strict=True):
            said = evaluated.tokenizer.decode(written, skip_special_tokens=True).strip()
            right = how_right(said, question.answers, self.options.match)
            found.append({"where": question.where, "tokens": len(prompt), "right": right, "answer": said})
        return {"prompts": found, "state_bytes": num_bytes // len(prompts)}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """Returns `cells` by model: `accuracy`, the mean of right answers, with its 95 % bounds `low` and `high`.

        They are Wilson's, or the bootstrap's if some answers are right in part.
        """
        cells, prompts = [], []
        for name in (model.name for model in self.models):
            records = [record for item, record in measured if item.model.name == name]
            own = [prompt for record in records for prompt in record["prompts"]]
            prompts += [{"model": name, **prompt} for prompt in own]
            share = _mean([prompt["right"] for prompt in own])
            longest = max(prompt["tokens"] for prompt in own)
            state = max(record["state_bytes"] for record in records)
            cells.append({"model": name, **share, "longest_prompt": longest, "state_bytes": state})
        return {"cells": cells, "prompts": prompts, "left_out": dict(self.left_out)}

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return results["prompts"]

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        of_which = "of the expected" if results["match"] == "all" else "right"
        measure = f"answers to {data_of(results)} [% {of_which}]"
        return [figure_of(cell["model"], measure, cell, results) for cell in results["cells"]]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns a table with a line per model, then the prompts left out, if any."""
        columns = ["model", "% right", "95 % interval", "prompts", "longest prompt [tokens]", "state [KiB]", "dtype"]
        rows = []
        for cell in results["cells"]:
            name, length = cell["model"], f"{cell['longest_prompt']:,}"
            state = kibibytes([cell]), dtype_of(name, results)
            rows.append([shown_name(name, results), *in_percent(cell), f"{cell['total']:,}", length, *state])
        title = f"answers to {data_of(results)}; {RULES[results['match']]}"
        return [Table(title, columns, rows), *left_out_table("left out", "prompts", results)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws bars of the right answers, with their intervals."""
        cells = results["cells"]
        names = [shown_name(cell["model"], results) for cell in cells]
        with picture(path, figsize=(5 + 0.08 * max(25, *map(len, names)), 1 + 0.45 * len(cells))) as axes:
            shares, low, high = ([100 * cell[field] for cell in cells] for field in ("accuracy", "low", "high"))
            axes.barh(names, shares, height=0.6, alpha=0.85)
            axes.hlines(names, low, high, color="black")
            axes.invert_yaxis()
            axes.set(xlim=(0, 100), xlabel=f"% right of {cells[0]['total']:,} prompts; lines: 95 % interval")
            axes.spines[["top", "right"]].set_visible(False)


def how_right(answer: str, expected: Sequence[str], match: str) -> bool | float:
    """Returns whether an answer matches one of the expected ones; for `match` "all", the share of them that it matches.

    The share is RULER's convention for lists of values.
    """
    text = _plain(answer)
    matched = [regex.fullmatch(_pattern(_plain(one), match), text) is not None for one in expected]
    return fmean(matched) if match == "all" else any(matched)


def _mean(shares: Sequence[bool | float]) -> dict[str, Any]:
    """Returns the mean of right answers with its interval; `correct` counts them if each is right or wrong."""
    if set(shares) <= {0, 1}:
        return pool([{"correct": int(sum(shares)), "total": len(shares)}])
    low, high = bootstrap(shares)
    return {"total": len(shares), "accuracy": fmean(shares), "low": low, "high": high}


def _format_number(number: int | float) -> str:
    """Formats a number as text; columns with gaps hold whole numbers as floats."""
    return json.dumps(int(number) if isinstance(number, float) and number.is_integer() else number)


def _pattern(expected: str, match: str) -> str:
    """Returns a regular expression for the whole answer.

    Letters and digits end a word, except in scripts without spaces between words. Signs and separators between digits
    belong to a number.
    """
    before, after = "", rf"(?!{MARK})"
    if regex.match(WORD, expected[0]):
        before = rf"(?<!{WORD}(?:{MARK})*)"
    if regex.match(rf"{WORD}|{MARK}", expected[-1]):
        after += rf"(?!{WORD})"
    if expected[0].isdigit():  # not within 3.14, 1,000 or 1/2, nor after a sign without a letter or digit before it
        before += rf"(?<!\d[.,/])(?<!(?<!{WORD})[-+.])"
    elif regex.match(r"[-+.]+\d", expected):  # its sign is not a minus or point between digits
        before = rf"(?<!{WORD}(?:{MARK})*)"
    if expected[-1].isdigit():
        after += r"(?![.,/]\d)"
    return PATTERNS[match].format(before=before, text=regex.escape(expected), after=after)


def _plain(text: str) -> str:
    """Returns the text with one kind of case, white space and minus sign, and letters composed with their accents."""
    spaced = " ".join(text.replace("\N{MINUS SIGN}", "-").split())
    return normalize("NFC", normalize("NFD", spaced).casefold())  # case may depend on the composition


def read_questions(options: AnswersOptions) -> Iterator[Question | Problem]:
    """Yields the questions of all files, and lines without one as problems. Raises `ValueError` without files."""
    for files in options.data:
        for shard in open_shards(Source(files=files), (options.prompt_field, options.answer_field)):
            for records, _ in shard.chunks():
                for where, fields in records:
                    yield _question(where, fields, options)


def _question(where: str, fields: Any, options: AnswersOptions) -> Question | Problem:
    if isinstance(fields, Problem):
        return fields
    found = []
    for name in (options.prompt_field, options.answer_field):
        value = find_field(fields, name)
        if value is MISSING or value is None or value != value:  # NaN is a gap in a column of numbers
            remedy = "name the right fields with --prompt-field and --answer-field; a.b is a field within an object"
            return Problem(where, "missing field", f"{name!r}; there are {field_names(fields)}: {remedy}")
        found.append(value)
    prompt, answers = found[0], found[1] if isinstance(found[1], list) else [found[1]]
    if not isinstance(prompt, str):
        return Problem(where, "wrong type", f"{options.prompt_field!r} is {type(prompt).__name__}, not text")
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in answers):
        what = f"{options.answer_field!r} is neither text, nor a number, nor a list of these"
        return Problem(where, "wrong type", what)
    if any(isinstance(one, float) and not math.isfinite(one) for one in answers):
        return Problem(where, "missing field", f"{options.answer_field!r} is not a finite number")
    texts = [one if isinstance(one, str) else _format_number(one) for one in answers]
    try:
        "".join([prompt, *texts]).encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair
        return wrong_encoding(where, error)
    if not prompt.strip() or not texts or not all(text.strip() for text in texts):
        return Problem(where, "empty prompt or answer")
    return Question(where, prompt, texts)
