"""The long-text benchmarks of lm-evaluation-harness, by task and length: RULER, BABILong, LongBench v2, ...

A cell is a task at a length. Benchmarks that generate their texts do so at that length. For others, the cell holds the
texts of more than half of the length and at most the length, in tokens of the model.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval

from ..charts import finish
from ..harness import CondenseLM, StockLM
from ..harness_tasks import BENCHMARKS, FILLED, default_folder, load_task, longest_sample, requests_of, tasks_of
from ..models import EvaluatedModel
from ..overview import Figure, lengths_of, remark_of
from ..results import Table, groups_of, picture, some_table
from ..results_store import Key, Record
from ..runner import Results
from ..statistics import bootstrap
from ..tables import key_by, pivot, select
from .evaluation import Evaluation
from .options import SuiteOptions

MOST_ANSWER_TOKENS = 2**14  # in any of these benchmarks, for GraphWalks


class Cell(NamedTuple):
    model: EvaluatedModel
    benchmark: str
    task: str
    length: int


class Suite(Evaluation[Cell]):
    """A record has `samples`, each with its score, its answer and its prompt's tokens. `left_out` is the reason if
    there are none, and `documents` the task's number of texts. If texts have their own lengths, `of_this_length` counts
    the cell's texts; `shortest` and `longest` are tokens over all texts.

    Raises `ValueError` for unknown benchmarks, texts that cannot be loaded, or prompts that a model would cut.
    """

    kind = "suite"
    unit = "cell"
    Options = SuiteOptions

    def __init__(self, options: SuiteOptions, models: Sequence[EvaluatedModel]):
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        super().__init__(options, models)
        self.tasks = tasks_of(options.benchmarks)
        self.folder = Path(options.samples) if options.samples else default_folder()
        self._reader: tuple[str, Any] = ("", None)  # of the only model in memory
        self._last: tuple[tuple[Any, ...], Any] = ((), None)
        self._sizes: dict[tuple[str, str], list[int]] = {}
        for model in models:
            if (longest := max(options.lengths)) > (max_length := self.reader_of(model).max_length):
                raise ValueError(
                    f"{model.name} reads {max_length:,} tokens at most, and prompts of {longest:,} would be cut: give "
                    "it --lengths within that, with a separate --output; a report shows both."
                )
        by_length = sorted(self.items(), key=lambda cell: -cell.length)
        shortest = {(cell.model.name, cell.task): cell for cell in by_length}
        for cell in shortest.values():  # refuses missing texts before anything is measured
            self._load(cell)
        self._check_longest()

    @classmethod
    def load(cls, options: SuiteOptions) -> "Suite":
        tasks_of(options.benchmarks)  # before the models are loaded
        return super().load(options)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"lm_eval": version("lm-eval")}

    def items(self) -> list[Cell]:
        return [
            Cell(model, benchmark, task, length)
            for model in self.models
            for task, benchmark in self.tasks.items()
            for length in self.options.lengths
            if BENCHMARKS[benchmark].made_at(length)
        ]

    def num_tokens(self, item: Cell) -> int:
        return item.length

    def key(self, item: Cell) -> Key:
        return {"model": item.model.name, "task": item.task, "length": item.length}

    def measure(self, item: Cell) -> Record:
        task, metric = self._load(item), BENCHMARKS[item.benchmark].metric or str(item.length)
        documents, record = self._documents(item, task)
        if not documents:
            return record
        tokens = self._check_room(item, task, documents)
        answered = lm_eval.evaluate(
            lm=self.reader_of(item.model),
            task_dict={"tasks": {item.task: task}, "groups": {}},
            samples={item.task: documents},
            bootstrap_iters=0,
        )
        record["samples"] = [
            {
                "document": sample["doc_id"],
                "tokens": tokens[sample["doc_id"]],
                "prompt": sample["prompt_hash"],
                "answer": sample["filtered_resps"],
                "score": float(sample[metric]),
            }
            for sample in answered["samples"][item.task]
        ]
        return record

    def _check_longest(self) -> None:
        """Refuses prompts that a model would cut, before anything is measured. Checks lengths near its limit."""
        for cell in self.items():
            if cell.length + MOST_ANSWER_TOKENS > self.reader_of(cell.model).max_length:
                task = self._load(cell)
                self._check_room(cell, task, self._documents(cell, task)[0])

    def reader_of(self, evaluated: EvaluatedModel) -> Any:
        if evaluated.name != self._reader[0]:
            self._reader = ("", None)  # before the next model is loaded
            reader = StockLM if evaluated.segment_length is None else CondenseLM
            made = reader(evaluated.model, tokenizer=evaluated.tokenizer, batch_size=self.options.batch_size)
            self._reader = (evaluated.name, made)
        return self._reader[1]

    def _load(self, cell: Cell) -> Any:
        """Returns the task with its texts; the previous cell's task is cached."""
        made = BENCHMARKS[cell.benchmark].lengths is not None
        key = (cell.model.name, cell.task, cell.length if made else None)
        if key != self._last[0]:
            self._last = ((), None)
            model = (cell.model.source, cell.model.tokenizer)
            task = load_task(cell.benchmark, cell.task, cell.length, *model, self.options.seed, self.folder)
            self._last = (key, task)
        return self._last[1]

    def _documents(self, cell: Cell, task: Any) -> tuple[list[int], Record]:
        """Returns the documents of a cell, and its record without samples."""
        documents, left_out = list(range(len(task.eval_docs))), ""
        record: Record = {"documents": len(documents), "samples": []}
        if cell.benchmark == "ruler" and (reached := longest_sample(task)) < FILLED * cell.length:
            documents, left_out = [], f"its samples end at {reached:,} tokens"
        if BENCHMARKS[cell.benchmark].lengths is None:
            sizes = self._sizes_of(cell, task)
            documents = [number for number in documents if cell.length / 2 < sizes[number] <= cell.length]
            left_out = "" if documents else "no text has this length"
            record |= {"of_this_length": len(documents), "shortest": min(sizes), "longest": max(sizes)}
        return documents[: self.options.num_prompts], record | {"left_out": left_out}

    def _sizes_of(self, cell: Cell, task: Any) -> list[int]:
        """Returns the tokens of each document's prompt, counted once for a model and a task."""
        key, documents = (cell.model.name, cell.task), range(len(task.eval_docs))
        if key not in self._sizes:
            sizes = dict.fromkeys(documents, 0)
            for request in requests_of(task, cell.model.tokenizer, documents, 0):
                sizes[request.document] = request.prompt_tokens
            self._sizes[key] = list(sizes.values())
        return self._sizes[key]

    def _check_room(self, cell: Cell, task: Any, documents: Sequence[int]) -> dict[int, int]:
        """Returns the tokens of each document's prompt. Raises `ValueError` if the harness would cut one."""
        reader, tokens = self.reader_of(cell.model), dict[int, int]()
        for request in requests_of(task, cell.model.tokenizer, documents, reader.max_gen_toks):
            tokens[request.document] = request.prompt_tokens
            if request.prompt_tokens + request.answer_tokens > reader.max_length:
                raise ValueError(
                    f"{cell.task} at {cell.length:,} tokens: a prompt of {request.prompt_tokens:,} tokens and an "
                    f"answer of up to {request.answer_tokens:,} are more than {cell.model.name} reads "
                    f"({reader.max_length:,}), and the prompt would be cut. Leave this length or this task out."
                )
        return tokens

    def summarise(self, measured: Sequence[tuple[Cell, Record]]) -> dict[str, Any]:
        """Returns scored `cells`, `means` by benchmark over its tasks' samples, and what was `left_out`."""
        cells = [{"benchmark": cell.benchmark, **self.key(cell), **record} for cell, record in measured]
        for cell in cells:
            cell |= _score(cell["samples"])
        means = []
        for (model, benchmark, length), own in groups_of(cells, "model", "benchmark", "length").items():
            if samples := [sample for cell in own for sample in cell["samples"]]:
                means.append({"model": model, "benchmark": benchmark, "length": length, **_score(samples)})
        lengths, left_out = list(self.options.lengths), self._left_out(cells)
        return {"lengths": lengths, "cells": cells, "means": means, "left_out": left_out}

    def _left_out(self, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [
            {"model": "all", "task": name, "length": length, "why": "the benchmark has no texts of this length"}
            for name in dict.fromkeys(self.tasks.values())
            for length in self.options.lengths
            if not BENCHMARKS[name].made_at(length)
        ]
        found += [
            {"model": cell["model"], "task": cell["task"], "length": cell["length"], "why": cell["left_out"]}
            for cell in cells
            if cell["left_out"]
        ]
        own = [cell for cell in cells if "of_this_length" in cell]
        for (model, task), mine in groups_of(own, "model", "task").items():
            total, shortest, longest = (mine[0][name] for name in ("documents", "shortest", "longest"))
            if others := total - sum(cell["of_this_length"] for cell in mine):
                why = f"{others:,} of {total:,} texts have other lengths: {shortest:,} to {longest:,} tokens"
                found.append({"model": model, "task": task, "length": None, "why": why})
        return found

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        """Returns the mean over lengths for each benchmark."""
        found = []
        for (model, name), means in groups_of(results["means"], "model", "benchmark").items():
            value = 100 * sum(mean["score"] for mean in means) / len(means)
            lengths = lengths_of([mean["length"] for mean in means])
            found.append(Figure(model, f"{name}, {lengths} [score of 100]", value, remark=remark_of(model, results)))
        return found

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [{name: value for name, value in cell.items() if name != "samples"} for cell in results["cells"]]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns tables of benchmarks by length, of each one's tasks, and of what was left out."""
        made = [_table("means of the tasks", "benchmark", results["means"], results["lengths"])]
        for (name,), cells in groups_of(results["cells"], "benchmark").items():
            made.append(_table(name, "task", cells, results["lengths"]))
        rows = [
            [one["task"], one["model"], f"{one['length']:,}" if one["length"] else "", one["why"]]
            for one in results["left_out"]
        ]
        return made + some_table("left out", ["task", "model", "tokens", "why"], rows)

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws a panel for each benchmark: the mean score against length."""
        names = [name for (name,) in groups_of(results["means"], "benchmark")] or ["nothing measured"]
        with picture(path, columns=len(names), figsize=(4 * len(names), 3.2), squeeze=False) as panels:
            for axes, name in zip(panels[0], names, strict=True):
                for (model,), means in groups_of(results["means"], "model").items():
                    points = sorted(select(means, benchmark=name), key=lambda one: one["length"])
                    lengths = [point["length"] for point in points]
                    axes.plot(lengths, [100 * point["score"] for point in points], marker="o", label=model)
                    low, high = ([100 * point[bound] for point in points] for bound in ("low", "high"))
                    axes.fill_between(lengths, low, high, alpha=0.15)
                axes.set_xscale("log", base=2)
                axes.set_ylim(0, 100)
                finish(axes, name, "tokens", legend=7)


def _score(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and 95 % interval (bootstrap over samples); None without samples."""
    scores = [sample["score"] for sample in samples]
    low, high = bootstrap(scores) if scores else (None, None)
    return {
        "score": sum(scores) / len(scores) if scores else None,
        "low": low,
        "high": high,
        "prompts": len(scores),
        "longest_prompt": max((sample["tokens"] for sample in samples), default=None),
    }


def _table(title: str, name: str, cells: Sequence[dict[str, Any]], lengths: Sequence[int]) -> Table:
    """Returns a table by model and `name`, and by length: the score and the number of prompts."""
    rows = {(model, one): (one, model) for model, one in groups_of(cells, "model", name)}
    scored = key_by((cell for cell in cells if cell["prompts"]), "model", name, "length")
    columns = {length: f"{length:,}" for length in lengths}
    return pivot(f"{title}: score of 100 (prompts), by tokens", [name, "model"], scored, rows, columns, _format_score)


def _format_score(cell: dict[str, Any] | None) -> str:
    return f"{100 * cell['score']:.1f} ({cell['prompts']:,})" if cell else "-"
