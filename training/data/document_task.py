"""The documents of a recipe: how many are needed, which are held out, and how much of each source a run reads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..recipe import DocumentData, Recipe, Source, Stage, SummarizationData, TextData
from .answers import AnswerExamples, question_encoder
from .batches import evaluated_sources
from .continued import DocumentExamples, Lot, continue_run, plans, sequences_asked
from .preparation import is_prepared, prepare
from .store import ALL, Encode, Need, Store, folder_of
from .summarization import summary_encoder
from .text import StoredExamples, TextExamples, text_encoder

LEAST_DOCUMENTS = 64  # that texts come from, where not all are read


class SourceReading(NamedTuple):
    """Counts what a run reads of a source; `documents` and `tokens` are those that it draws from."""

    source: str
    documents: int
    tokens: int
    documents_read: int
    tokens_read: int
    share: float  # of all tokens that the run reads

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.tokens_read:,} tokens, {self.share:.1%} of the run, from {self.documents_read:,} of "
            f"{self.documents:,} documents with {self.tokens:,} tokens"
        )


class DocumentsRead(NamedTuple):
    """The examples to train on, those to validate with, and all documents that training draws from."""

    training: DocumentExamples
    held_out: StoredExamples | None
    drawn_from: StoredExamples


class NotPrepared(Exception):
    """Raised if documents would have to be prepared."""


class DocumentTask:
    """A recipe's documents: how many are needed, and which are held out.

    Files are read whole, and a run draws from all of their documents. Of a data set of the hub, and of files beside
    one, it reads as many documents as its steps need, from the first on.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: DocumentData,
        tokenizer,
        num_workers: int = 0,
        former: Sequence[Sequence[Stage]] = (),
        only_prepared: bool = False,
    ):
        """With `only_prepared`, `examples` raises `NotPrepared` instead of preparing documents."""
        self.recipe, self.data, self.tokenizer, self.num_workers = recipe, data, tokenizer, num_workers
        self.only_prepared = only_prepared
        self.reads_all = all(source.files is not None for source in data.sources)
        self.longest, self.num_held_out = recipe.longest_text(), recipe.num_held_out
        self.asked = [sequences_asked(plan) for plan in plans(recipe, former)]

    def _need(self, asked: dict[int, int]) -> Need:
        if not isinstance(self.data, TextData):
            return Need(np.ones_like, sum(asked.values()), "documents")
        tokens = sum(total_length * count for total_length, count in asked.items())
        if self.data.fit == "pack":
            # A remainder of a single token predicts nothing.
            return Need(lambda lengths: lengths - (lengths % self.longest == 1), tokens)
        return Need(lambda lengths: lengths // self.longest * self.longest, tokens)

    def _training_need(self, asked: dict[int, int], num_before: int) -> Need:
        """Returns the need of a run after held-out documents of the weight `num_before`."""
        need = self._need(asked)
        if self.reads_all:
            return need._replace(amount=ALL)
        return need._replace(amount=need.amount + num_before, documents=self._least())

    def _least(self) -> int:
        """Returns how many documents the sequences come from at least, since a single book may be enough."""
        return LEAST_DOCUMENTS if isinstance(self.data, TextData) else 0

    def _prepare(self, sources: Sequence[Source], need: Need) -> Store:
        data, settings = self.data, dict[str, Any](total_length=self.longest)
        encoder: Callable[..., Encode] = question_encoder
        if isinstance(data, TextData):
            encoder, settings = text_encoder, {"min_tokens": data.min_tokens}
        elif isinstance(data, SummarizationData):
            encoder, settings = summary_encoder, settings | {"too_long": data.too_long}
        if sources is not data.sources:  # max_documents limits what is trained on
            data = data.model_copy(update={"max_documents": None})
        folder = folder_of(data, sources, self.tokenizer, task=self.recipe.data.task, **settings)
        if self.only_prepared and not is_prepared(folder, data, need):
            raise NotPrepared
        make_encode = partial(encoder, self.tokenizer, **settings)
        return prepare(folder, data, sources, make_encode, need, self.num_workers)

    def _of(self, store: Store, first: int, last: int, seed: int | None) -> StoredExamples:
        if isinstance(self.data, TextData):
            return TextExamples(store, first, last, self.data.fit, seed)
        return AnswerExamples(store, first, last, seed)

    def _lot(self, asked: dict[int, int], need: Need, lengths: np.ndarray) -> Lot:
        last = min(need.prefix(lengths), self.data.max_documents or len(lengths))
        return Lot(asked, last, is_enough=need.weight(lengths[:last]) >= need.amount)

    def examples(self) -> DocumentsRead:
        first, held_out, num_before = self._held_out()
        needs = [self._training_need(asked, num_before) for asked in self.asked]
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
        training = continue_run(lambda first, last: self._of(store, first, last, self.recipe.seed), first, lots)
        return DocumentsRead(training, held_out, self._of(store, first, max(lot.last for lot in lots), None))

    def _held_out(self) -> tuple[int, StoredExamples | None, int]:
        """Returns how many training documents are held out, the examples to validate with, and their weight.

        The evaluation's own sources hold no training documents out.
        """
        if (evaluation := self.recipe.evaluation) is None:
            return 0, None, 0
        need = self._need({self.longest: self.num_held_out})
        if evaluation.sources:
            need = need._replace(documents=self._least())
        read_all = self.reads_all and not evaluation.sources
        store = self._prepare(evaluation.sources or self.data.sources, need._replace(amount=ALL) if read_all else need)
        num_documents = need.prefix(store.lengths)
        # More sequences than are asked for are drawn from: packed ones, which are sorted by length, or of many texts.
        is_drawn = isinstance(self.data, TextData) and (self.data.fit == "pack" or evaluation.sources)
        held_out = self._of(store, 0, num_documents, seed=0 if is_drawn else None)
        if evaluation.sources:
            return 0, held_out, 0
        return num_documents, held_out, need.weight(store.lengths[:num_documents])

    def reading(self, found: DocumentsRead) -> list[SourceReading]:
        """Returns how much of each source the run reads."""
        drawn_from, tokens = found.drawn_from, found.training.tokens_read(self.asked[-1])
        places = slice(drawn_from.first, drawn_from.last)
        sources, lengths, tokens, total = (
            drawn_from.store.sources[places],
            drawn_from.lengths,
            tokens[places],
            tokens.sum(),
        )
        return [
            SourceReading(
                source.label,
                documents=int((own := sources == number).sum()),
                tokens=int(lengths[own].sum()),
                documents_read=int((tokens[own] > 0).sum()),
                tokens_read=int(tokens[own].sum()),
                share=float(tokens[own].sum() / total),
            )
            for number, source in enumerate(self.data.sources)
        ]

    def description(self, found: DocumentsRead) -> list[str]:
        """Returns lines about the sequences of each length, and about what the run reads of each source."""
        lines, drawn_from = [], found.drawn_from
        for total_length, asked in self.asked[-1].items():
            available, left_out = drawn_from.num_sequences(total_length), drawn_from.left_out(total_length)
            lines.append(
                f"sequences of {total_length} tokens: {asked:,} to train on, {available:,} available: "
                f"{asked / available:.2f} epochs" + (f"; {left_out}" if left_out else "")
            )
        lines += [f"  {reading}" for reading in self.reading(found)]
        if drawn_from.first:
            lines.append(f"  held out for validation: the first documents, {drawn_from.first:,}")
        evaluation = self.recipe.evaluation
        if evaluation and len(evaluation.sources or self.data.sources) > 1 and not evaluated_sources(self.recipe):
            lines.append("packed sequences mix sources: eval_loss has no part by source, unlike with data.fit=cut")
        return lines
