"""Summaries by the model's own decoding, scored with ROUGE by length of the document (table II, figures 9, 11, 12).

The prompt is that of training (appendix D). A summary ends at a token of the end, or after so many tokens. It is
sampled at a low temperature from the whole vocabulary, one token after another: what a checkpoint's own
generation_config says of top-k, top-p, beams and penalties isn't used, so that all models decode alike.

How documents are read: see `corpus`; the metric: see `rouge`. All models get the same documents in the same
batches. The bucket of a document is chosen by its own tokens, the prompt's frame not counted, as the first model's
tokenizer makes them: so rows of a table compare the same documents. A bucket holds low <= tokens < high.

Axes: B rows, N columns of the prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from training.data.documents import Document
from training.data.summarization import prompt_ids
from training.recipe import Source

from .corpus import Corpus, find_source, read_corpus
from .models import Subject, generate, load_subjects
from .records import Records, open_records
from .results import Table, circumstances, picture, write_results
from .rouge import METRICS, Rouge
from .statistics import bootstrap

BUCKETS = {"0-512": (0, 512), "512-1024": (512, 1024), "1024+": (1024, np.inf), "overall": (0, np.inf)}


def summarization(
    models: Sequence[str],
    output: Path,
    data: str | Source,
    text_field: str | None = None,
    summary_field: str | None = None,
    num_documents: int | None = None,
    longest: int | None = None,
    bad_documents: Literal["refuse", "skip"] = "refuse",
    temperature: float = 0.3,
    new_tokens: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    dtype: str = "auto",
    attention: str = "auto",
) -> dict[str, Any]:
    """Measures models (folders or hub ids, `NAME=FOLDER` for a name), and writes output/summarization.*.

    `data`: see `find_source`; `num_documents`, `longest` and `bad_documents`: see `read_corpus`. Stopped and
    called again with the same arguments, it goes on and ends with what an unbroken run gives.
    """
    Rouge()  # a missing package is missed before anything is loaded
    decoding = Decoding(temperature, new_tokens, batch_size, seed)
    source = data if isinstance(data, Source) else find_source(data, text_field, summary_field)
    subjects = load_subjects(list(models), dtype, attention)
    corpus = read_corpus(source, subjects[0].tokenizer, num_documents, longest, bad_documents)
    settings = {
        "models": [subject.describe() for subject in subjects],
        "data": data if isinstance(data, str) else source.hub or source.files,
        "fingerprint": corpus.fingerprint,
        **asdict(decoding),
        "attention": attention,
    }
    with open_records(output / "summarization.records.jsonl", settings) as records:
        documents = []
        for subject in subjects:
            documents += measure_summarization(subject, corpus, decoding, records)
        cells = average(documents)
        results = {
            "kind": "summarization",
            **circumstances(),
            **settings,
            "longest": longest,
            "left_out": corpus.left_out,
            "cells": cells,
            "documents": documents,
        }
        write_results(output / "summarization", results, cells)
        draw(results, output / "summarization")
    return results


@dataclass(frozen=True)
class Decoding:
    """How summaries are written. Temperature 0 takes the likeliest token; above, what is drawn depends on the batch."""

    temperature: float = 0.3
    new_tokens: int = 256
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf or min(self.new_tokens, self.batch_size) < 1 or self.seed < 0:
            raise ValueError(
                f"temperature={self.temperature}, new_tokens={self.new_tokens}, batch_size={self.batch_size}, "
                f"seed={self.seed}: pass temperature and seed from 0 on, and at least one token and one document."
            )


def measure_summarization(
    subject: Subject, corpus: Corpus, decoding: Decoding = Decoding(), records: Records | None = None
) -> list[dict[str, Any]]:
    """One record per document: its length, the reference, the prediction and their ROUGE F1.

    A batch is measured at once and kept as one record. It draws its random numbers from the seed and its own
    number, so that its summaries don't depend on where a run was stopped. Sets torch's global seed.
    """
    batch_size = decoding.batch_size
    rouge, documents, records = Rouge(), list[dict[str, Any]](), records or Records(None, {})
    with tqdm(total=len(corpus.documents), unit=" documents", desc=f"summarization {subject.name}") as bar:
        for number, first in enumerate(range(0, len(corpus.documents), batch_size)):
            batch = corpus.documents[first : first + batch_size]
            lengths = corpus.num_tokens[first : first + batch_size]

            def measure(number=number, batch=batch, lengths=lengths) -> dict[str, Any]:
                answers = summarize(subject, [item.text for item in batch], decoding, number)
                scored = [_score(rouge, *one) for one in zip(batch, lengths, answers, strict=True)]
                return {"documents": scored}

            kept = records.get({"model": subject.name, "batch": number}, measure)["documents"]
            documents += [{"model": subject.name, **document} for document in kept]
            bar.update(len(batch))
    return documents


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


def summarize(subject: Subject, texts: Sequence[str], decoding: Decoding, number: int = 0) -> list[tuple[str, int]]:
    """The summaries of batch `number`, each with the number of its tokens, the end not counted.

    Raises `ValueError` where neither model nor tokenizer has a token that ends a text.
    """
    model, tokenizer = subject.model, subject.tokenizer
    ends = model.generation_config.eos_token_id  # one token or several, as with models made for chats
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise ValueError(f"{subject.source} has no token that ends a text: set its tokenizer's eos token.")
    pad = min(ends) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts = [prompt_ids(tokenizer, text) for text in texts]
    num_columns = max(map(len, prompts))
    ids_BN = torch.tensor([[pad] * (num_columns - len(prompt)) + prompt for prompt in prompts])
    mask_BN = torch.tensor([[0] * (num_columns - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(int(np.random.SeedSequence([decoding.seed, number]).generate_state(1)[0]))
    sequences, _ = generate(
        model,
        ids_BN,
        mask_BN,
        max_new_tokens=decoding.new_tokens,
        do_sample=decoding.temperature > 0,
        temperature=decoding.temperature or None,
        top_k=None,
        top_p=None,
        repetition_penalty=None,
        num_beams=1,
        eos_token_id=sorted(ends),
        pad_token_id=pad,
    )
    answers = []
    for row in sequences[:, num_columns:].tolist():
        summary = list(takewhile(lambda token: token not in ends, row))
        answers.append((tokenizer.decode(summary, skip_special_tokens=True).strip(), len(summary)))
    return answers


def bucket_of(num_tokens: int) -> str:
    return next(bucket for bucket, (low, high) in BUCKETS.items() if low <= num_tokens < high)


def average(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model and bucket: means over documents, with `_low` and `_high` of the 95 % bootstrap interval.

    None where a bucket is empty; one document has a mean and no interval.
    """
    cells = []
    for name in dict.fromkeys(document["model"] for document in documents):
        for bucket in BUCKETS:
            found = [item for item in documents if item["model"] == name and bucket in (item["bucket"], "overall")]
            cell: dict[str, Any] = {"model": name, "bucket": bucket, "documents": len(found)}
            for metric in METRICS:
                values = [document[metric] for document in found]
                cell[metric] = fmean(values) if values else None
                low, high = bootstrap(values) if len(values) > 1 else (None, None)
                cell |= {f"{metric}_low": low, f"{metric}_high": high}
            cell["new_tokens"] = fmean(document["new_tokens"] for document in found) if found else None
            cells.append(cell)
    return cells


def tables(results: dict[str, Any]) -> list[Table]:
    """As table II: models and buckets below each other; behind it what was left out, if anything was."""
    first = results["models"][0]["name"]
    rows = []
    for cell in results["cells"]:
        scores = [_figure(cell, metric) for metric in METRICS]
        mean_new = "" if cell["new_tokens"] is None else f"{cell['new_tokens']:.1f}"
        rows.append([cell["model"], cell["bucket"], f"{cell['documents']:,}", *scores, mean_new])
    columns = ["model", f"document [tokens of {first}]", "documents", *METRICS.values(), "summary [own tokens]"]
    title = (
        f"summaries of {results['data']}: mean F1 from 0 to 1, with 95 % bootstrap intervals over documents; words "
        "stemmed, ROUGE-L over the whole text, ROUGE-Lsum line by line"
    )
    left_out = [[reason, f"{count:,}"] for reason, count in results["left_out"].items()]
    more = [Table("documents left out", ["reason", "documents"], left_out)] if left_out else []
    return [Table(title, columns, rows), *more]


def _figure(cell: dict[str, Any], metric: str) -> str:
    mean, low, high = (cell[f"{metric}{suffix}"] for suffix in ("", "_low", "_high"))
    if mean is None:
        return ""
    return f"{mean:.4f}" if low is None else f"{mean:.4f} ({low:.3f} to {high:.3f})"


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel per metric: bars of all models side by side in each bucket, with their intervals."""
    names = [model["name"] for model in results["models"]]
    cells = {(cell["model"], cell["bucket"]): cell for cell in results["cells"]}
    counts = [cells[names[0], bucket]["documents"] for bucket in BUCKETS]
    labels = [f"{bucket}\nn = {count:,}" for bucket, count in zip(BUCKETS, counts, strict=True)]
    width = 0.8 / len(names)
    with picture(path, 2, 2, figsize=(9, 6)) as panels:
        for axes, (metric, title) in zip(panels.flat, METRICS.items(), strict=True):
            for turn, name in enumerate(names):
                places = np.arange(len(BUCKETS)) + (turn - (len(names) - 1) / 2) * width
                figures = [[cells[name, bucket][metric + kind] for kind in ("", "_low", "_high")] for bucket in BUCKETS]
                means, lows, highs = np.array(figures, dtype=float).T  # NaN where there is none
                axes.bar(places, means, width, label=name, alpha=0.85)
                axes.vlines(places, lows, highs, color="black", linewidth=1)
            axes.set_title(title, fontsize=10)
            axes.set_ylabel("F1", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.axvline(len(BUCKETS) - 1.5, color="gray", linewidth=0.8, linestyle=":")
            axes.set_xticks(range(len(BUCKETS)), labels, fontsize=8)
        axes.figure.supxlabel(
            f"document [tokens of {names[0]}]; n documents; whiskers: 95 % bootstrap intervals", fontsize=9
        )
        handles, _ = axes.get_legend_handles_labels()
        axes.figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 4), fontsize=9)
