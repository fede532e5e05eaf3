"""Passkey retrieval on a grid of length x depth, by the model's own decoding (figure 8 of the paper)."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from condense.generation.chat import chat_frame, end_tokens
from condense.training.data.passkey import PasskeyTask

from .. import paper
from ..models import EvaluatedModel
from ..results import Table
from ..results_store import Record
from ..runner import Results
from ..tables import select
from .evaluation import complete, in_percent, kibibytes, naming_length, shown_name, state_unit
from .grids import Batch, Grid, pool
from .options import PasskeyOptions

CHAT_TOKENS = 32  # for an answer in a chat, which is a sentence


class Passkey(Grid):
    """The number in the decoded answer must be the key, digit by digit.

    A completion must begin with it; in a chat it must be the first number. Raises `ValueError` for lengths below the
    frame of the prompt.
    """

    kind = "passkey"
    row = "depth"
    row_title = "depth of the key"
    Options = PasskeyOptions

    def __init__(self, options: PasskeyOptions, models: Sequence[EvaluatedModel]):
        if options.chat and options.window is not None:
            raise ValueError(f"--window {options.window} has no chats, and --chat is given: leave one of them out.")
        super().__init__(options, models)
        self.prompts = {}
        for model in self.models:
            frame = chat_frame(model.tokenizer) if model.name in options.chat else None
            self.prompts[model.name] = PasskeyTask(model.tokenizer, options.num_keys, options.num_digits, frame)
        shortest = min(options.lengths)
        for name, prompts in self.prompts.items():  # refuses lengths that are too short before anything is measured
            with naming_length(shortest, name):
                prompts.batch(1, shortest, np.random.default_rng(0))

    @staticmethod
    def label(row: float) -> str:
        return f"{100 * row:.4g} %"

    def measure(self, item: Batch) -> Record:
        model, tokenizer, prompts = item.model.model, item.model.tokenizer, self.prompts[item.model.name]
        generator = np.random.default_rng([self.options.seed, item.length, item.row_number])
        # a cell's prompts are drawn one after another, however they are batched
        passkeys = prompts.batch(item.size, item.length, generator, item.row, skip=item.first)
        chat, ending = item.model.name in self.options.chat, dict[str, Any]()
        find_number, new_tokens = first_number, passkeys.answer_ids_BA.shape[1]  # the text after the key isn't needed
        if chat:
            find_number, new_tokens = stated_number, CHAT_TOKENS
            ending["eos_token_id"] = sorted(end_tokens(model, tokenizer, chat)) or None
        found_BN, state = complete(item.model, passkeys.prompt_ids_BN, new_tokens, **ending)
        answers = zip(tokenizer.batch_decode(found_BN), passkeys.keys, strict=True)
        correct = sum(find_number(answer) == key for answer, key in answers)
        return {"chat": chat, "correct": correct, "total": item.size, "state_bytes": state}

    def _of_cell(self, record: Record) -> dict[str, Any]:
        return {"chat": record["chat"]}

    @classmethod
    def variant(cls, results: Results) -> str:
        numbers = {name: results.get(name, usual) for name, usual in paper.PASSKEY_SETTINGS.items()}
        return (
            "" if numbers == paper.PASSKEY_SETTINGS else " of {num_keys} keys of {num_digits} digits".format(**numbers)
        )

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns a table by length, over all depths: a column of accuracies and one of state bytes per model.

        The last column is the paper's, if the keys are of its kind and it has one of the lengths.
        """
        columns = ["tokens"]
        rows: dict[int, list[Any]] = {length: [f"{length:,}"] for length in results["lengths"]}
        for name in (model["name"] for model in results["models"]):
            columns += [f"{shown_name(name, results)}: % correct", "95 % interval"]
            columns.append(f"state [{state_unit(results, name)}]")
            for length, row in rows.items():
                cells = select(results["cells"], model=name, length=length)
                row += [*in_percent(pool(cells)), kibibytes(cells)]
        is_like = all(results.get(name) == value for name, value in paper.PASSKEY_SETTINGS.items())
        if is_like and any(length in paper.PASSKEY for length in rows):
            columns.append("paper: % correct")
            for length, row in rows.items():
                row.append(paper.PASSKEY.get(length, ""))
        return [Table("passkey retrieval, all depths together", columns, list(rows.values()))]


def first_number(answer: str) -> str:
    """Returns the digits at the start of an answer; tokenizers may put spaces between them."""
    return "".join(takewhile(str.isdigit, "".join(answer.split())))


def stated_number(answer: str) -> str:
    """Returns the first number in a sentence; tokenizers may put spaces between its digits."""
    found = re.search(r"\d.*", answer, re.DOTALL)
    return first_number(found[0]) if found else ""
