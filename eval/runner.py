"""The driver of every measurement: configuration, resume, measure, write, draw.

A `Task` says what is measured, item by item; `run` measures the items that an earlier start has not measured, writes
each record when it is there, and in the end the results and their pictures.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tqdm import tqdm

from .results import Table, run_metadata, write_results
from .results_store import Key, Record, ResultsStore, open_results_store

Item = TypeVar("Item")
Results = dict[str, Any]


class Task(ABC, Generic[Item]):
    """One kind of measurement, configured. Its items are independent of each other and are measured in their order.

    `kind` names the files: KIND.records.jsonl, KIND.json, KIND.csv. The progress bar counts in `unit`s.
    """

    kind: ClassVar[str]
    unit: ClassVar[str] = "item"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that the records depend on: a measurement under other settings is another one."""

    @abstractmethod
    def items(self) -> Sequence[Item]: ...

    @abstractmethod
    def key(self, item: Item) -> Key:
        """The name of an item's record: values of JSON, different for each item."""

    @abstractmethod
    def measure(self, item: Item) -> Record:
        """The record: a value of JSON without numbers that are not finite. May run in a process of its own."""

    @abstractmethod
    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        """The fields of the results that the records give."""

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Item, Record]]) -> Results:
        """The fields of KIND.json beside the kind and the metadata of the run."""
        return settings | self.summarise(measured)

    @abstractmethod
    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """The lines of KIND.csv."""

    @classmethod
    @abstractmethod
    def tables(cls, results: Results) -> list[Table]:
        """The tables for the terminal and the report, of results as KIND.json holds them."""

    @classmethod
    @abstractmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Writes the pictures; `path` is KIND in the output folder."""


def run(task: Task, output: Path) -> Results:
    """Measures a task, writes the files of its kind into `output`, and returns what KIND.json holds.

    A start with the same settings resumes after the records that are there. Raises `ValueError` where they were
    written under other settings, and where another process measures the same kind in this folder.
    """
    path, settings = output / task.kind, task.settings()
    with open_results_store(path.with_name(f"{task.kind}.records.jsonl"), settings) as store:
        measured = measure(task, store)
        results = {"kind": task.kind, **run_metadata(), **task.results(settings, measured)}
        write_results(path, results, task.rows(results))
        task.draw(results, path)
    return results


def measure(task: Task[Item], store: ResultsStore | None = None) -> list[tuple[Item, Record]]:
    """The items of a task with their records: those of the store, and else measured now."""
    store, measured = store or ResultsStore(None, {}), []
    with tqdm(task.items(), desc=task.kind, unit=task.unit) as bar:
        for item in bar:
            key = task.key(item)
            bar.set_postfix_str(" ".join(map(str, key.values())))
            measured.append((item, store.get(key, partial(task.measure, item))))
    return measured
