"""The examples of a recipe: to train on and to validate with."""

import os
from collections.abc import Callable, Sequence
from functools import partial

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

VALIDATION_SEED = 2**40  # added to the seed of the run: other generated texts than those of training


def make_examples(
    recipe: Recipe, tokenizer, num_workers: int = 0, former: Sequence[Sequence[Stage]] = ()
) -> tuple[Examples, Examples | None]:
    """Training examples and, where the recipe has an evaluation, others for it.

    Prepares documents first, in `num_workers` processes, or in this one. `former` are the stages that a resumed run has
    had before those of its recipe, oldest first: its documents then keep their order.
    """
    if isinstance(recipe.data, GeneratedData):
        task = make_generated_task(recipe.data, tokenizer)
        training = GeneratedExamples(task, recipe.data, recipe.seed)
        held_out = GeneratedExamples(task, recipe.data, recipe.seed + VALIDATION_SEED)
        for stage in recipe.stages or ():  # too short a length is refused before anything is trained
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
    """The model's own texts; the first ones are held out for the evaluation."""
    plans = [recipe.model_copy(update={"stages": stages}) for stages in (*former, recipe.stages)]
    lasts, num_held_out = [plan.num_samples() for plan in plans], recipe.num_held_out
    store = sample_store(data, recipe.model.source, tokenizer, recipe.longest_text(), max(lasts))
    training = continued(
        lambda first, last: TextExamples(store, first, last, "cut", recipe.seed),
        num_held_out,
        [Lot(sequences_asked(plan), last) for plan, last in zip(plans, lasts, strict=True)],
    )
    return training, TextExamples(store, 0, num_held_out, "cut", None) if num_held_out else None


def sequences_asked(recipe: Recipe) -> dict[int, int]:
    """The sequences of each length that a recipe trains on."""
    assert recipe.stages is not None and recipe.global_batch is not None
    asked = {stage.total_length: 0 for stage in recipe.stages}
    for stage in recipe.stages:
        asked[stage.total_length] += stage.steps * recipe.global_batch
    return asked


class DocumentTask:
    """A recipe's documents: the number that is needed, and those that are held out."""

    def __init__(
        self,
        recipe: Recipe,
        data: TextData | SummarizationData | QuestionData,
        tokenizer,
        num_workers: int = 0,
        former: Sequence[Sequence[Stage]] = (),
    ):
        self.recipe, self.data, self.tokenizer, self.num_workers = recipe, data, tokenizer, num_workers
        self.longest, self.asked = recipe.longest_text(), sequences_asked(recipe)
        self.former = [sequences_asked(recipe.model_copy(update={"stages": stages})) for stages in former]
        self.num_held_out = recipe.num_held_out

    def _need(self, asked: dict[int, int]) -> Need:
        if not isinstance(self.data, TextData):
            return Need(np.ones_like, sum(asked.values()), "documents")
        tokens = sum(total_length * count for total_length, count in asked.items())
        if self.data.fit == "pack":
            # A remainder of a single token predicts nothing.
            return Need(lambda lengths: lengths - (lengths % self.longest == 1), tokens)
        return Need(lambda lengths: lengths // self.longest * self.longest, tokens)

    def _prepare(self, sources: Sequence[Source], need: Need) -> Store:
        make_encode: Callable[[], Encode]
        settings: dict[str, str | int]
        if isinstance(self.data, TextData):
            make_encode = partial(text_encoder, self.tokenizer, self.data.min_tokens)
            settings = {"min_tokens": self.data.min_tokens}
        elif isinstance(self.data, QuestionData):
            make_encode = partial(question_encoder, self.tokenizer, self.longest)
            settings = {"total_length": self.longest}
        else:
            make_encode = partial(summary_encoder, self.tokenizer, self.longest, self.data.too_long)
            settings = {"total_length": self.longest, "too_long": self.data.too_long}
        data = self.data
        if sources is not data.sources:  # max_documents limits what is trained on
            data = data.model_copy(update={"max_documents": None})
        folder = folder_of(data, sources, self.tokenizer, task=data.task, **settings)
        return prepare(folder, data, sources, make_encode, need, data.task != "text", self.num_workers)

    def _of(self, store: Store, first: int, last: int, seed: int | None) -> StoredExamples:
        if isinstance(self.data, TextData):
            return TextExamples(store, first, last, self.data.fit, seed)
        return AnswerExamples(store, first, last, seed)

    def _lot(self, asked: dict[int, int], need: Need, lengths: np.ndarray) -> Lot:
        last = min(need.prefix(lengths), self.data.max_documents or len(lengths))
        return Lot(asked, last, is_enough=int(need.weigh(lengths[:last]).sum()) >= need.amount)

    def examples(self) -> tuple[Examples, Examples | None]:
        evaluation, first, held_out, num_before = self.recipe.evaluation, 0, None, 0
        if evaluation:
            need_held_out = self._need({self.longest: self.num_held_out})
            store = self._prepare(evaluation.sources or self.data.sources, need_held_out)
            num_documents = need_held_out.prefix(store.lengths)
            held_out = self._of(store, 0, num_documents, seed=None)
            if not evaluation.sources:  # training begins after them
                first = num_documents
                num_before = int(need_held_out.weigh(store.lengths[:first]).sum())
        needs = [self._need(asked) for asked in (*self.former, self.asked)]
        needs = [need._replace(amount=need.amount + num_before) for need in needs]
        store = self._prepare(self.data.sources, max(needs, key=lambda need: need.amount))
        lots = [
            self._lot(asked, need, store.lengths) for asked, need in zip((*self.former, self.asked), needs, strict=True)
        ]
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
        for total_length, asked in self.asked.items():
            available, left_out = training.num_sequences(total_length), training.left_out(total_length)
            print(
                f"sequences of {total_length} tokens: {asked:,} to train on, {available:,} available: "
                f"{asked / available:.2f} epochs" + (f"; {left_out}" if left_out else ""),
                flush=True,
            )
