"""Prompts, each followed by the tokens to predict: questions with answers, documents with summaries."""

from collections.abc import Sequence

import numpy as np

from condense.utils.text import first_tokens

from .documents import Document
from .store import Tokens
from .text import Plan, StoredExamples


def question_encoder(tokenizer, total_length: int):
    """Returns an encoder of prompts with their answers and an eos, at most `total_length` tokens.

    Prompt and answer are one text to the tokenizer, after the first tokens of every text: a model sees the same tokens
    in training and in use. A token with characters of both belongs to the answer.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not report where an answer begins: load a fast tokenizer.")
    first = first_tokens(tokenizer)
    last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode_one(prompt: str, ids: list[int], offsets: list[tuple[int, int]]) -> Tokens | str:
        num_given = len(first) + sum(end <= len(prompt) for _, end in offsets)
        ids = [*first, *ids, *([] if ids[-1:] == last else last)]
        if len(ids) > total_length:
            return f"over {total_length} tokens"
        return Tokens(np.array(ids), num_given) if num_given else "no token before the answer"

    def encode(documents: Sequence[Document]) -> list[Tokens | str]:
        texts = [document.text + document.summary for document in documents]
        encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        columns = zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [encode_one(document.text, ids, offsets) for document, ids, offsets in columns]

    return encode


class AnswerExamples(StoredExamples):
    """One prompt with its answer per sequence."""

    def left_out(self, total_length: int) -> str:
        documents = len(self.lengths) - self.num_sequences(total_length)
        return f"{documents:,} longer documents left out" if documents else ""

    def _plan(self, total_length: int) -> Plan:
        fitting = np.flatnonzero(self.lengths <= total_length)
        if not len(fitting):
            raise ValueError(f"no prompt with its answer fits into total_length={total_length} tokens: allow more.")
        return Plan(fitting, np.zeros_like(fitting), self.lengths[fitting], np.arange(len(fitting) + 1))
