"""The examples of a recipe: to train on and to validate with."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..recipe import (
    DigitsData,
    GeneratedData,
    QuestionData,
    Recipe,
    SampleData,
    Source,
    Stage,
    SummarizationData,
    TextData,
)
from .answers import AnswerExamples, question_encoder
from .batches import evaluated_sources
from .continued import Lot, continued
from .digits import DigitExamples, split
from .examples import Examples
from .generated import GeneratedExamples, make_generated_task
from .preparation import prepare
from .samples import sample_store
from .store import Encode, Need, Store, folder_of
from .summarization import summary_encoder
from .text import StoredExamples, TextExamples, text_encoder

VALIDATION_SEED = 2**40  # added to the run's seed: validation has other generated texts than training
Documents = TextData | SummarizationData | QuestionData


def make_examples(
    recipe: Recipe, tokenizer, num_workers: int = 0, former: Sequence[Sequence[Stage]] = ()
) -> tuple[Examples, Examples | None]:
    """Returns the examples to train on and, if the recipe has an evaluation, others to validate with.

    Prepares documents first, in `num_workers` processes; 0 prepares in this one. `former` are the stages that a resumed
    run had before its recipe's, oldest first: its documents keep their order.
    """
    if isinstance(recipe.data, GeneratedData):
        task = make_generated_task(recipe.data, tokenizer)
        training = GeneratedExamples(task, recipe.data, recipe.seed)
        held_out = GeneratedExamples(task, recipe.data, recipe.seed + VALIDATION_SEED)
        for stage in recipe.stages or ():  # refuses a length that is too short, before anything is trained
            training.sequence(0, stage.total_length)
        return training, held_out if recipe.evaluation else None
    if isinstance(recipe.data, DigitsData):
        numbers, others = split()
        return DigitExamples(numbers, recipe.seed), DigitExamples(others, None) if recipe.evaluation else None
    if isinstance(recipe.data, SampleData):
        return sampled_examples(recipe, recipe.data, tokenizer, former)
    return DocumentTask(recipe, recipe.data, tokenizer, num_workers, former).examples()


def sampled_examples(
    recipe: Recipe, data: SampleData, tokenizer, former: Sequence[Sequence[Stage]]
) -> tuple[Examples, Examples | None]:
    """Returns the model's own texts; the first ones are held out for the evaluation."""
    plans = _plans(recipe, former)
    lasts, num_held_out = [plan.num_samples() for plan in plans], recipe.num_held_out
    store = sample_store(data, recipe.model.source, tokenizer, recipe.longest_text(), max(lasts))
    training = continued(
        lambda first, last: TextExamples(store, first, last, "cut", recipe.seed),
        num_held_out,
        [Lot(sequences_asked(plan), last) for plan, last in zip(plans, lasts, strict=True)],
    )
    return training, TextExamples(store, 0, num_held_out, "cut", None) if num_held_out else None


def _plans(recipe: Recipe, former: Sequence[Sequence[Stage]]) -> list[Recipe]:
    return [recipe.model_copy(update={"stages": stages}) for stages in (*former, recipe.stages)]


def sequences_asked(recipe: Recipe) -> dict[int, int]:
    """Returns the number of sequences of each length that a recipe trains on."""
    assert recipe.stages is not None and recipe.global_batch is not None
    asked = Counter[int]()
    for stage in recipe.stages:
        asked[stage.total_length] += stage.steps * recipe.global_batch
    return asked


class DocumentTask:
    """A recipe's documents: how many are needed, and which are held out."""

    def __init__(self, recipe: Recipe, data: Documents, tokenizer, num_workers: int, former: Sequence[Sequence[Stage]]):
        self.recipe, self.data, self.tokenizer, self.num_workers = recipe, data, tokenizer, num_workers
        self.longest, self.num_held_out = recipe.longest_text(), recipe.num_held_out
        self.asked = [sequences_asked(plan) for plan in _plans(recipe, former)]

    def _need(self, asked: dict[int, int]) -> Need:
        if not isinstance(self.data, TextData):
            return Need(np.ones_like, sum(asked.values()), "documents")
        tokens = sum(total_length * count for total_length, count in asked.items())
        if self.data.fit == "pack":
            # A remainder of a single token predicts nothing.
            return Need(lambda lengths: lengths - (lengths % self.longest == 1), tokens)
        return Need(lambda lengths: lengths // self.longest * self.longest, tokens)

    def _prepare(self, sources: Sequence[Source], need: Need) -> Store:
        data, settings = self.data, dict[str, Any](total_length=self.longest)
        encoder: Callable[..., Encode] = question_encoder
        if isinstance(data, TextData):
            encoder, settings = text_encoder, {"min_tokens": data.min_tokens}
        elif isinstance(data, SummarizationData):
            encoder, settings = summary_encoder, settings | {"too_long": data.too_long}
        if sources is not data.sources:  # max_documents limits what is trained on
            data = data.model_copy(update={"max_documents": None})
        folder = folder_of(data, sources, self.tokenizer, task=data.task, **settings)
        make_encode = partial(encoder, self.tokenizer, **settings)
        return prepare(folder, data, sources, make_encode, need, self.num_workers)

    def _of(self, store: Store, first: int, last: int, seed: int | None) -> StoredExamples:
        if isinstance(self.data, TextData):
            return TextExamples(store, first, last, self.data.fit, seed)
        return AnswerExamples(store, first, last, seed)

    def _lot(self, asked: dict[int, int], need: Need, lengths: np.ndarray) -> Lot:
        last = min(need.prefix(lengths), self.data.max_documents or len(lengths))
        return Lot(asked, last, is_enough=need.weight(lengths[:last]) >= need.amount)

    def examples(self) -> tuple[Examples, Examples | None]:
        evaluation, first, held_out, num_before = self.recipe.evaluation, 0, None, 0
        if evaluation:
            need_held_out = self._need({self.longest: self.num_held_out})
            store = self._prepare(evaluation.sources or self.data.sources, need_held_out)
            num_documents = need_held_out.prefix(store.lengths)
            packs = isinstance(self.data, TextData) and self.data.fit == "pack"
            # Packed sequences are sorted by length, and more than are asked for: a random order takes some of each.
            held_out = self._of(store, 0, num_documents, seed=0 if packs else None)
            if not evaluation.sources:  # training begins after the held-out documents
                first = num_documents
                num_before = need_held_out.weight(store.lengths[:first])
        needs = [need._replace(amount=need.amount + num_before) for need in map(self._need, self.asked)]
        store = self._prepare(self.data.sources, max(needs, key=lambda need: need.amount))
        lots = [self._lot(asked, need, store.lengths) for asked, need in zip(self.asked, needs, strict=True)]
        if first >= (last := lots[0].last):
            raise ValueError(
                f"the {self.num_held_out} sequences of the evaluation take all {last} documents: name others in "
                "evaluation.sources, or ask for fewer with evaluation.sequences."
            )
        if held_out and held_out.num_sequences(self.longest) < self.num_held_out:
            raise ValueError(
                f"evaluation.sequences={self.num_held_out}, and its documents make only "
                f"{held_out.num_sequences(self.longest)} of {self.longest} tokens: ask for fewer, or name more."
            )
        training = continued(lambda first, last: self._of(store, first, last, self.recipe.seed), first, lots)
        if os.environ.get("RANK", "0") == "0":
            self._describe(self._of(store, first, max(lot.last for lot in lots), None))
            if evaluation and len(evaluation.sources or self.data.sources) > 1 and not evaluated_sources(self.recipe):
                print(
                    "packed sequences mix sources: eval_loss has no part by source, unlike with data.fit=cut",
                    flush=True,
                )
        return training, held_out

    def _describe(self, training: StoredExamples) -> None:
        for total_length, asked in self.asked[-1].items():
            available, left_out = training.num_sequences(total_length), training.left_out(total_length)
            print(
                f"sequences of {total_length} tokens: {asked:,} to train on, {available:,} available: "
                f"{asked / available:.2f} epochs" + (f"; {left_out}" if left_out else ""),
                flush=True,
            )
