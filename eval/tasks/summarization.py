"""Summaries by the model's own decoding, scored with ROUGE by length of the document (table II, figures 9, 11, 12).

The prompt is the one from training (appendix D), in a chat as a user's message. A summary ends at an end-of-sequence
token, at the end of the turn in a chat, or at the token limit. It is sampled token by token at a low temperature from
the whole vocabulary. The top-k, top-p, beams and penalties of a checkpoint's generation_config are not used, so all
models decode alike.

`corpus` reads the documents and `rouge` is the metric. All models get the same documents in the same batches. Buckets
(low <= tokens < high) go by a document's own tokens, without the prompt's frame. The first model's tokenizer counts
them, so the rows of a table compare the same documents.

Axes: B rows, N columns of the prompts.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.generation.chat import chat_ids, end_tokens
from condense.training.data.documents import Document
from condense.training.data.summarization import prompt_ids, prompt_text

from .. import paper
from ..decoding import max_positions
from ..models import EvaluatedModel
from ..overview import Figure, remark_of
from ..results import Table, groups_of, picture
from ..results_store import Key, Record
from ..runner import Results
from ..statistics import bootstrap
from ..tables import key_by, select
from .corpus import Corpus, find_source, read_corpus
from .evaluation import Evaluation, answer, left_out_table, shown_name
from .options import SummarizationOptions
from .rouge import METRICS, SCORES, Rouge

BUCKETS = {"0-512": (0, 512), "512-1024": (512, 1024), "1024+": (1024, np.inf), "overall": (0, np.inf)}


class Batch(NamedTuple):
    """A batch of documents for one model. Its random numbers depend on the seed and `number`."""

    model: EvaluatedModel
    number: int
    documents: list[Document]
    num_tokens: list[int]


class Summarization(Evaluation[Batch]):
    """Measures a batch of documents at once and stores it as one record. Sets torch's global seed.

    Temperature 0 picks the likeliest tokens; above 0 the sampled tokens depend on the batch.
    """

    kind = "summarization"
    unit = "batch"
    Options = SummarizationOptions

    def __init__(self, options: SummarizationOptions, models: Sequence[EvaluatedModel], corpus: Corpus):
        super().__init__(options, models)
        self.corpus, self.rouge = corpus, Rouge()

    @classmethod
    def load(cls, options: SummarizationOptions) -> "Summarization":
        Rouge()  # fails for a missing package before anything is loaded
        source = find_source(options.data, options.text_field, options.summary_field)
        models, chosen = cls.load_models(options), (options.num_documents, options.longest, options.bad_documents)
        return cls(options, models, read_corpus(source, models[0].tokenizer, *chosen))

    def settings(self) -> dict[str, Any]:
        scored_by = {name: version(name) for name in ("rouge-score", "sentencex")}
        return super().settings() | {"fingerprint": self.corpus.fingerprint, "scored_by": scored_by}

    def items(self) -> list[Batch]:
        size, (documents, num_tokens, _) = self.options.batch_size, self.corpus
        return [
            Batch(model, number, documents[first : first + size], num_tokens[first : first + size])
            for model in self.models
            for number, first in enumerate(range(0, len(documents), size))
        ]

    def num_tokens(self, item: Batch) -> int | None:
        known, segment_length = max_positions(item.model.config), item.model.segment_length
        if known is None or (segment_length is not None and 2 * segment_length <= known):
            return None  # without a look at the prompts
        chat = item.model.name in self.options.chat
        prompts = (prompt_of(item.model.tokenizer, document.text, chat) for document in item.documents)
        return max(map(len, prompts)) + self.options.new_tokens

    def key(self, item: Batch) -> Key:
        return {"model": item.model.name, "batch": item.number}

    def measure(self, item: Batch) -> Record:
        """Returns `documents`, each with its length, the reference, the prediction and their ROUGE F1."""
        answers = summarize(item.model, [document.text for document in item.documents], self.options, item.number)
        scored, chat = zip(item.documents, item.num_tokens, answers, strict=True), item.model.name in self.options.chat
        return {"documents": [{"chat": chat, **_score(self.rouge, *one)} for one in scored]}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        documents = [
            {"model": batch.model.name, **document} for batch, record in measured for document in record["documents"]
        ]
        corpus = {"longest": self.options.longest, "left_out": self.corpus.left_out}
        return corpus | {"cells": average(documents), "documents": documents}

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        found = []
        for cell in select(results["cells"], bucket="overall"):
            for metric, title in METRICS.items() if cell["documents"] else ():
                measure = f"summaries of {Path(results['data']).name}, {title} [F1]"
                figures, remark = _with_bounds(cell, metric), remark_of(cell["model"], results)
                found.append(Figure(cell["model"], measure, *figures, digits=4, remark=remark))
        return found

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return results["cells"]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns table II, by model and bucket, then the documents that were left out, if any.

        The paper's rows follow if documents, temperature and summary length match the paper's.
        """
        first = results["models"][0]["name"]
        rows = []
        for cell in results["cells"]:
            scores = [_figure(cell, metric, with_interval=metric in METRICS) for metric in SCORES]
            mean_new = "" if cell["new_tokens"] is None else f"{cell['new_tokens']:.1f}"
            name = shown_name(cell["model"], results)
            rows.append([name, cell["bucket"], f"{cell['documents']:,}", *scores, mean_new])
        columns = ["model", f"document [tokens of {first}]", "documents", *SCORES.values(), "summary [own tokens]"]
        title = (
            f"summaries of {results['data']}: mean F1 from 0 to 1, with 95 % bootstrap intervals over documents; words "
            "stemmed, and unstemmed; ROUGE-L over the whole text, ROUGE-Lsum sentence by sentence"
        )
        if all(results.get(name) == value for name, value in paper.ROUGE_SETTINGS.items()):
            rows += _paper_rows()
            title += "; the paper does not say whether its words are stemmed"
        return [Table(title, columns, rows), *left_out_table("documents left out", "documents", results)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws a panel per metric: bars of all models side by side in each bucket, with their intervals."""
        names = [model["name"] for model in results["models"]]
        cells = key_by(results["cells"], "model", "bucket")
        counts = [cells[names[0], bucket]["documents"] for bucket in BUCKETS]
        labels = [f"{bucket}\nn = {count:,}" for bucket, count in zip(BUCKETS, counts, strict=True)]
        with picture(path, 2, 2, figsize=(9, 6)) as panels:
            for axes, (metric, title) in zip(panels.flat, METRICS.items(), strict=True):
                _draw_bars(axes, metric, names, cells)
                axes.set_title(title, fontsize=10)
                axes.set_xticks(range(len(BUCKETS)), labels, fontsize=8)
            said = f"document [tokens of {names[0]}]; n documents; whiskers: 95 % bootstrap intervals"
            axes.figure.supxlabel(said, fontsize=9)
            handles, _ = axes.get_legend_handles_labels()
            shown = [shown_name(name, results) for name in names]
            axes.figure.legend(handles, shown, loc="outside upper center", ncols=min(len(names), 4), fontsize=9)


def _score(rouge: Rouge, document: Document, num_tokens: int, answer: tuple[str, int]) -> dict[str, Any]:
    prediction, num_new = answer
    return {
        "where": document.where,
        "tokens": num_tokens,
        "bucket": bucket_of(num_tokens),
        **rouge.f1(document.summary, prediction),
        "new_tokens": num_new,
        "reference": document.summary,
        "prediction": prediction,
    }


def summarize(
    evaluated: EvaluatedModel, texts: Sequence[str], options: SummarizationOptions, number: int = 0
) -> list[tuple[str, int]]:
    """Returns the summaries of batch `number`, each with its number of tokens, not counting the end.

    Raises `ValueError` if neither model nor tokenizer has an end-of-text token.
    """
    tokenizer, chat = evaluated.tokenizer, evaluated.name in options.chat
    ends = end_tokens(evaluated.model, tokenizer, chat)
    if not ends:
        raise ValueError(f"{evaluated.source} has no end-of-text token: set its tokenizer's eos token.")
    prompts = [prompt_of(tokenizer, text, chat) for text in texts]
    torch.manual_seed(int(np.random.SeedSequence([options.seed, number]).generate_state(1)[0]))
    sampling: dict[str, Any] = {"do_sample": options.temperature > 0, "temperature": options.temperature or None}
    rows, _ = answer(evaluated, prompts, ends, max_new_tokens=options.new_tokens, top_k=None, **sampling)
    return [(tokenizer.decode(row, skip_special_tokens=True).strip(), len(row)) for row in rows]


def prompt_of(tokenizer: Any, text: str, chat: bool) -> list[int]:
    return chat_ids(tokenizer, prompt_text(text)) if chat else prompt_ids(tokenizer, text)


def bucket_of(num_tokens: int) -> str:
    return next(bucket for bucket, (low, high) in BUCKETS.items() if low <= num_tokens < high)


def average(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns means over documents by model and bucket, with `_low` and `_high` of the 95 % bootstrap interval.

    Values are None if a bucket is empty; a single document has a mean without an interval.
    """
    cells = []
    for (name, chat), own in groups_of(documents, "model", "chat").items():
        for bucket in BUCKETS:
            found = [item for item in own if bucket in (item["bucket"], "overall")]
            cell: dict[str, Any] = {"model": name, "chat": chat, "bucket": bucket, "documents": len(found)}
            for metric in SCORES:
                values = [document[metric] for document in found]
                cell[metric] = fmean(values) if values else None
                low, high = bootstrap(values) if len(values) > 1 else (None, None)
                cell |= {f"{metric}_low": low, f"{metric}_high": high}
            cell["new_tokens"] = fmean(document["new_tokens"] for document in found) if found else None
            cells.append(cell)
    return cells


def _with_bounds(cell: dict[str, Any], metric: str) -> list[Any]:
    return [cell.get(f"{metric}{suffix}") for suffix in ("", "_low", "_high")]


def _figure(cell: dict[str, Any], metric: str, with_interval: bool = True) -> str:
    mean, low, high = _with_bounds(cell, metric)
    if mean is None:  # an empty bucket, or results from before this metric
        return ""
    return f"{mean:.4f} ({low:.3f} to {high:.3f})" if with_interval and low is not None else f"{mean:.4f}"


def _paper_rows() -> list[list[str]]:
    return [
        [f"paper: {model}", bucket, "", *(f"{score:.4f}" for score in scores), *[""] * (len(SCORES) - len(scores) + 1)]
        for model, by_bucket in paper.ROUGE.items()
        for bucket, scores in by_bucket.items()
    ]


def _draw_bars(axes: Any, metric: str, names: Sequence[str], cells: dict[tuple[str, str], dict[str, Any]]) -> None:
    width = 0.8 / len(names)
    for turn, name in enumerate(names):
        x = np.arange(len(BUCKETS)) + (turn - (len(names) - 1) / 2) * width
        figures = [_with_bounds(cells[name, bucket], metric) for bucket in BUCKETS]
        means, lows, highs = np.array(figures, dtype=float).T  # NaN in an empty bucket
        axes.bar(x, means, width, label=name, alpha=0.85)
        axes.vlines(x, lows, highs, color="black", linewidth=1)
    axes.set_ylabel("F1", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(len(BUCKETS) - 1.5, color="gray", linewidth=0.8, linestyle=":")
