"""Recall of key-value pairs by their number and the length of the text: how much a memory holds."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.training.data.recall import FORMS, RecallTask

from ..charts import finish, heat_map, side_by_side
from ..models import EvaluatedModel
from ..overview import Figure, remark_of
from ..results import Table, groups_of, picture
from ..results_store import Key, Record
from ..runner import Results
from ..tables import key_by, pivot, select
from .evaluation import Evaluation, complete, dtype_of, kibibytes, naming_length, shown_name, with_interval
from .grids import LINE_STYLES, count_cells, pool, prompts_per_batch
from .options import RecallOptions

RECALLED = 0.9  # the share of right answers that counts as recall
MARKERS = {"": "o", ">=": "^", "<": "v"}  # of capacities and their bounds
BOUNDS = {">=": "at least", "<": "less than"}


class Batch(NamedTuple):
    """A batch of prompts of one cell. Prompts depend only on the seed, the form, the length and the pairs."""

    model: EvaluatedModel
    form: str
    length: int  # as asked for
    pairs: int
    num_tokens: int  # answer included
    first: int  # number of the first prompt in its cell
    size: int


class Recall(Evaluation[Batch]):
    """Counts an answer as right if it begins with the value of the key asked for, or with all its values in order.

    A record counts the `correct` ones of `total` answers; `state_bytes` is the state at the end of one prompt. For a
    folded model, `by_segments` has lines with a number of segments from the pair to the answer, and `correct` and
    `total` for it. Raises `ValueError` for pairs that do not fit a length, before anything is measured.
    """

    kind = "recall"
    unit = "batch"
    Options = RecallOptions

    def __init__(self, options: RecallOptions, models: Sequence[EvaluatedModel]):
        super().__init__(options, models)
        self.prompts = {
            (model.name, form, pairs): RecallTask(model.tokenizer, pairs, form, options.values, options.overwritten)
            for model, form, pairs in product(models, options.forms, options.pairs)
        }
        for (name, *_), prompts in self.prompts.items():
            for length in filter(None, options.lengths):
                with naming_length(length, name):
                    prompts.check_length(length)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"by_segments": True}  # older records lack these counts

    def items(self) -> list[Batch]:
        options = self.options
        return [
            Batch(model, form, length, pairs, num_tokens, first, min(size, options.num_prompts - first))
            for model, form, length, pairs in product(self.models, options.forms, options.lengths, options.pairs)
            for num_tokens in [length or self.prompts[model.name, form, pairs].length(pairs)]
            for size in [prompts_per_batch(model, num_tokens)]
            for first in range(0, options.num_prompts, size)
        ]

    def num_tokens(self, item: Batch) -> int:
        return item.num_tokens

    def key(self, item: Batch) -> Key:
        return {**_cell(item), "first_prompt": item.first}

    def measure(self, item: Batch) -> Record:
        prompts = self.prompts[item.model.name, item.form, item.pairs]
        cell = [self.options.seed, FORMS.index(item.form), item.length, item.pairs]
        drawn = [
            prompts.batch(1, item.num_tokens, np.random.default_rng([*cell, number]))  # the same in any batching
            for number in range(item.first, item.first + item.size)
        ]
        prompt_ids_BN = torch.cat([questions.prompt_ids_BN for questions in drawn])
        found_BN, state = complete(item.model, prompt_ids_BN, prompts.answer_length)  # the rest isn't asked for
        answers = item.model.tokenizer.batch_decode(found_BN)
        is_right = [
            re.findall(r"\w+", answer)[: len(words)] == words
            for answer, questions in zip(answers, drawn, strict=True)
            for words in questions.answers
        ]
        record: Record = {"correct": sum(is_right), "total": item.size, "state_bytes": state}
        if segment_length := item.model.segment_length:
            last = (prompt_ids_BN.shape[1] - 1) // segment_length
            back = [last - at // segment_length for questions in drawn for at in questions.said_at]
            record["by_segments"] = _count(back, is_right)
        return record

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """Returns `cells`, each with its `accuracy` and the bounds `low` and `high` (Wilson, 95 %). `by_segments` has
        them by number of segments from the pair to the answer, from `nearest` to `farthest`. `capacities` are by model,
        form and length. `memories` has each model's segment length, width and layers, None for a stock one."""
        cells = count_cells(measured, lambda item, record: {**_cell(item), "num_tokens": item.num_tokens})
        options, capacities = self.options, []
        for key, curve in groups_of(cells, "model", "form", "length").items():
            bound, pairs = capacity({cell["pairs"]: cell["accuracy"] for cell in curve})
            line = dict(zip(("model", "form", "length"), key, strict=True)) | {"bound": bound, "pairs": pairs}
            capacities.append({**line, "state_bytes": max(cell["state_bytes"] for cell in curve)})
        return {
            **{name: list(getattr(options, name)) for name in ("pairs", "lengths", "forms")},
            "cells": cells,
            "by_segments": _by_segments(measured),
            "capacities": capacities,
            "memories": {model.name: _memory(model) for model in self.models},
        }

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        found = []
        for line in results["capacities"]:
            name, measure = (
                line["model"],
                f"recall, {line['form']}, {_format_length(line['length'], ' tokens')} [pairs]",
            )
            found.append(Figure(name, measure, line["pairs"], sign=line["bound"], remark=remark_of(name, results)))
        return found

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return results["cells"]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns the capacities, then a table by pairs and length for each model and form. Folded models also get one
        by number of segments from the pair to the answer."""
        columns = ["model", "form", "tokens", "pairs", "state [KiB]", "dtype", "memory [segment x width x layers]"]
        rows = []
        for line in results["capacities"]:
            memory = results["memories"][line["model"]]
            size = "-" if memory is None else f"{' x '.join(map(str, memory))} = {math.prod(memory):,}"
            pairs, model = f"{line['bound']} {line['pairs']:.4g}".strip(), shown_name(line["model"], results)
            state = kibibytes([line]), dtype_of(line["model"], results)
            rows.append([model, line["form"], _format_length(line["length"]), pairs, *state, size])
        tables = [Table(f"capacity: pairs of which {RECALLED:.0%} are recalled", columns, rows)]
        by_pairs, lengths = {(n,): [n] for n in results["pairs"]}, {n: _format_length(n) for n in results["lengths"]}
        for model, form in product(results["models"], results["forms"]):
            own = {"model": model["name"], "form": form}
            title = f"{shown_name(model['name'], results)}, {form}: % correct (95 % interval) by"
            cells = key_by(select(results["cells"], **own), "pairs", "length")
            tables.append(pivot(f"{title} tokens", ["pairs"], cells, by_pairs, lengths, with_interval))
            if results["memories"][model["name"]] is not None and "by_segments" in results:  # older results have none
                tables.append(_segments_table(title, select(results["by_segments"], **own), results))
        return tables

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws a heat map of pairs x length per model and form. For memories of several sizes, draws their capacities
        in PATH-capacity."""
        models, forms, pairs, lengths = (results[name] for name in ("models", "forms", "pairs", "lengths"))
        if len(sizes := _sizes(results)) > 1:
            beside, width = path.with_name(f"{path.name}-capacity"), 2.6 + 1.1 * len(sizes)
            with picture(beside, columns=len(forms), figsize=(width * len(forms), 4.4), squeeze=False) as panels:
                for axes, form in zip(panels.flat, forms, strict=True):
                    _draw_capacities(axes, results, form, sizes)
                legend = panels[0, 0].get_legend_handles_labels()
                panels[0, 0].figure.legend(*legend, loc="outside lower center", ncols=2, fontsize=7)
        size = 2.4 + 0.62 * len(lengths), 1.7 + 0.36 * len(pairs)
        with side_by_side(path, len(models) * len(forms), *size) as panels:
            for axes, (model, form) in zip(panels, product(models, forms), strict=True):
                cells = key_by(select(results["cells"], model=model["name"], form=form), "pairs", "length")
                heat_map(
                    axes, cells, {number: f"{number:,}" for number in pairs}, {n: _format_length(n) for n in lengths}
                )
                axes.set(xlabel="tokens", ylabel="pairs")
                axes.set_title(f"{shown_name(model['name'], results)}, {form}", fontsize=10)


def _cell(item: Batch) -> dict[str, Any]:
    return {"model": item.model.name, "form": item.form, "length": item.length, "pairs": item.pairs}


def capacity(accuracy: Mapping[int, float]) -> tuple[str, float]:
    """Returns the largest number of pairs that is recalled, from the accuracy by number, after the sign of a bound.

    Accuracy is interpolated between numbers. Numbers beyond the first that is not recalled don't count. `>=`: all
    numbers are recalled; `<`: none.
    """
    (least, first), *_ = curve = sorted(accuracy.items())
    if first < RECALLED:
        return "<", least
    for (fewer, before), (more, after) in pairwise(curve):
        if after < RECALLED:
            return "", fewer + (more - fewer) * (before - RECALLED) / (before - after)
    return ">=", curve[-1][0]


def _sizes(results: Results) -> list[list[int]]:
    """Returns segment length, width and layers of all memories, by their product."""
    memories = {tuple(memory) for memory in results["memories"].values() if memory is not None}
    return sorted(map(list, memories), key=lambda memory: (math.prod(memory), memory))


def _draw_capacities(axes: Any, results: Results, form: str, sizes: list[list[int]]) -> None:
    """Draws the capacities of folded models by size: a line through the means of each size, per length and kind of
    memory. Bounds are triangles outside the lines; for several lengths they are nested."""
    sources = {model["name"]: model["memory_source"] for model in results["models"] if model["segment_length"]}
    kinds = sorted(set(sources.values()))
    for (number, length), (style, kind) in product(enumerate(results["lengths"]), enumerate(kinds)):
        color, values = f"C{number}", defaultdict(list)  # by size
        for line in results["capacities"]:
            if (line["form"], line["length"], sources.get(line["model"])) == (form, length, kind):
                at = sizes.index(results["memories"][line["model"]])
                values[at].append(math.nan if line["bound"] else line["pairs"])
                nested = 3 * (len(results["lengths"]) - 1 - number) if line["bound"] else 0
                look = {"marker": MARKERS[line["bound"]], "markersize": 5 + nested}
                axes.plot(at, line["pairs"], color=color, markerfacecolor="none" if style else color, **look)
        found = sorted(values)
        label = f"{_format_length(length)} tokens" + (f", {kind}" if len(kinds) > 1 else "")
        look = {"linestyle": LINE_STYLES[style % len(LINE_STYLES)], "label": label}
        axes.plot(found, [np.mean(values[at]) for at in found], color=color, **look)
    for bound, label in BOUNDS.items():
        if any(line["bound"] == bound for line in results["capacities"]):
            axes.plot([], [], color="gray", linestyle="none", marker=MARKERS[bound], label=label)
    axes.margins(x=0.12)
    axes.set_ylim(bottom=0)
    named = [f"{' x '.join(map(str, memory))}\n= {math.prod(memory):,}" for memory in sizes]
    axes.set_xticks(range(len(sizes)), named, fontsize=8)
    finish(axes, form, "memory [segment x width x layers]", f"pairs of which {RECALLED:.0%} are recalled")


def _memory(model: EvaluatedModel) -> list[int] | None:
    """Returns segment length, width and layers, whose product is the size of the memory; None for a stock model."""
    if model.segment_length is None:
        return None
    return [model.segment_length, model.config.hidden_size, model.config.num_hidden_layers]


def _count(back: Sequence[int], is_right: Sequence[bool]) -> list[list[int]]:
    """Returns lines of a number of segments, its right answers and all its answers."""
    right, total = Counter(segments for segments, right in zip(back, is_right, strict=True) if right), Counter(back)
    return [[segments, right[segments], total[segments]] for segments in sorted(total)]


def _range_of(segments: int) -> tuple[int, int]:
    """Returns the range of segments that are counted together: 0, 1, 2, 3 to 4, 5 to 8, ..."""
    farthest = 2 ** (segments - 1).bit_length() if segments else 0
    return farthest // 2 + 1 if segments > 1 else segments, farthest


def _by_segments(measured: Sequence[tuple[Batch, Record]]) -> list[dict[str, Any]]:
    counted = defaultdict(list)
    for item, record in measured:
        for segments, correct, total in record.get("by_segments", []):  # a stock model has none
            counted[*_cell(item).values(), *_range_of(segments)].append({"correct": correct, "total": total})
    fields = "model", "form", "length", "pairs", "nearest", "farthest"
    return [dict(zip(fields, key, strict=True)) | pool(records) for key, records in counted.items()]


def _segments_table(title: str, found: Sequence[dict[str, Any]], results: Results) -> Table:
    """Returns the accuracies by number of segments from the pair to the answer, of a model and form."""
    ranges = {one["nearest"]: one["farthest"] for one in sorted(found, key=lambda one: one["nearest"])}
    columns = {near: f"{near} to {far}" if near < far else str(near) for near, far in ranges.items()}
    rows = {
        (length, pairs): [_format_length(length), pairs]
        for length, pairs in product(results["lengths"], results["pairs"])
    }
    title += " segments from the pair to the answer, 0: in the same one"
    return pivot(title, ["tokens", "pairs"], key_by(found, "length", "pairs", "nearest"), rows, columns, with_interval)


def _format_length(length: int, unit: str = "") -> str:
    return f"{length:,}{unit}" if length else "no filler"
