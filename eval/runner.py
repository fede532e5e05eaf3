"""Drives every measurement: configure, resume, measure, write, draw.

A `Task` says what is measured, item by item. `run` measures the missing items, writes each record at once, and writes
the results and pictures at the end.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, Generic, TypeVar

from condense.hub.untrained import warn_if_untrained
from condense.utils.progress import ProgressBar, stoppable

from .overview import Figure
from .positions import find_limits, positions_exceeded
from .ranks import Ranks, call_on_ranks, join
from .results import Table, run_metadata, write_results
from .results_store import Key, Record, ResultsStore, encode, open_results_store

Item = TypeVar("Item")
Results = dict[str, Any]


class Task(ABC, Generic[Item]):
    """A configured measurement. Its items are independent of each other and are measured in order.

    `kind` names the files: KIND.records.jsonl, KIND.json, KIND.csv. The progress bar counts in `unit`s.
    """

    kind: ClassVar[str]
    unit: ClassVar[str] = "item"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns everything that the records depend on. Other settings make another measurement."""

    @abstractmethod
    def items(self) -> Sequence[Item]: ...

    @abstractmethod
    def key(self, item: Item) -> Key:
        """Returns the unique name of an item's record, as JSON values."""

    def in_words(self, item: Item) -> str:
        """Returns an item's name for a progress bar, by default the fields of its key that say something."""
        found = []
        for name, value in self.key(item).items():
            shown = name.replace("_", " ")
            if isinstance(value, bool) or value is None:
                found += [shown] if value else []
            else:
                found.append(value if isinstance(value, str) else f"{shown} {value:,}")
        return ", ".join(found)

    def num_tokens(self, item: Item) -> int | None:
        """Returns the tokens of an item's longest text; None if positions don't matter."""
        return None

    def model_of(self, item: Any) -> Any:
        """Returns the `EvaluatedModel` that reads the texts."""
        return item.model

    def shown_as(self, item: Any) -> str:
        """Returns the model's name in tables and pictures."""
        return self.model_of(item).name

    def positions_exceeded(self, item: Item) -> int | None:
        """Returns the model's number of positions if its longest text has more tokens."""
        num_tokens = self.num_tokens(item)
        return None if num_tokens is None else positions_exceeded(self.model_of(item).config, num_tokens)

    @abstractmethod
    def measure(self, item: Item) -> Record:
        """Returns the record: a JSON value with only finite numbers. May run in a separate process."""

    @abstractmethod
    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        """Returns the fields of the results that come from the records."""

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Item, Record]]) -> Results:
        """Returns the fields of KIND.json beside the kind and the metadata of the run."""
        return settings | self.summarise(measured)

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        """Returns each model's figures for the table of models and tasks at the top of a report."""
        return []

    @abstractmethod
    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """Returns the lines of KIND.csv."""

    @classmethod
    @abstractmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns the tables for terminal and report, from results as in KIND.json."""

    @classmethod
    @abstractmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Writes the pictures; `path` is KIND in the output folder."""


def run(task: Task, output: Path, ranks: Ranks | None = None) -> Results:
    """Measures a task, writes the files of its kind into `output`, and returns the contents of KIND.json.

    A start with the same settings resumes after the stored records. With `ranks`, this process is the first, and the
    others call `measure_share`. Raises `ValueError` if the stored records have other settings, or another process
    measures the same kind in this folder.
    """
    path, settings = output / task.kind, task.settings()
    marked = find_limits(task)
    with open_results_store(path.with_name(f"{task.kind}.records.jsonl"), settings) as store:
        with stoppable(lambda: f"{store.path} keeps {len(store.done):,} records"):
            measured = measure(task, store) if ranks is None else _measure_on_ranks(task, store, settings, ranks)
        with _named_if_damaged(store):
            results = {"kind": task.kind, **run_metadata(), **task.results(settings, measured)}
        if marked:
            results["positions_exceeded"] = marked
        if figures := task.overview(results):
            results["overview"] = [asdict(figure) for figure in figures]
        write_results(path, results, task.rows(results))
        task.draw(results, path)
    return results


def run_on_ranks(make: Callable[[Any, Path], Task], kind: str, options: Any, output: Path) -> Results | None:
    """Runs the task `make(options, output)` on `options.ranks` processes, or as one of a launcher's processes.

    Returns the contents of KIND.json; None in any process of a launcher except the first.
    """
    if options.ranks > 1:
        call_on_ranks(options.ranks, run_on_ranks, make, kind, replace(options, ranks=1), output)
        return json.loads((output / f"{kind}.json").read_text(encoding="utf-8"))
    ranks = join()
    if ranks is None or ranks.is_first:
        return run(make(options, output), output, ranks)
    try:
        task = make(options, output)
        settings = task.settings()
    except (ValueError, OSError):
        ranks.await_acceptance()  # exits if the first process refuses too, so only one prints the error
        raise
    measure_share(task, ranks, ranks.pending(settings))
    return None


@contextmanager
def _named_if_damaged(store: ResultsStore) -> Iterator[None]:
    """Turns any error from a file's records into one sentence, because they may have been edited."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if not store.num_found:
            raise
        why = f"no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{store.path} holds records of another form ({' '.join(why.split())}): delete it to start over, or pass "
            "another --output."
        ) from error


def measure(task: Task[Item], store: ResultsStore | None = None) -> list[tuple[Item, Record]]:
    """Returns the items of a task with their records, measured now if the store has none."""
    store, items = store or ResultsStore(None, {}), task.items()
    keys = [task.key(item) for item in items]
    done = sum(key in store for key in keys)
    with ProgressBar(total=len(items), initial=done, desc=task.kind, unit=task.unit) as bar:
        for item, key in zip(items, keys, strict=True):
            if key not in store:
                bar.set_postfix_str(task.in_words(item))
                store.add(encode(key, _record(task, item)))
                bar.update()
    store.sort(keys)
    return [(item, store[key]) for item, key in zip(items, keys, strict=True)]


def _record(task: Task[Item], item: Item) -> Record:
    """Returns the record of an item, with the positions of its model if a text is longer."""
    if (num_tokens := task.num_tokens(item)) is not None:
        warn_if_untrained(task.model_of(item).model, num_tokens)
    positions = task.positions_exceeded(item)
    return task.measure(item) | ({} if positions is None else {"positions_exceeded": positions})


def _measure_on_ranks(
    task: Task[Item], store: ResultsStore, settings: dict[str, Any], ranks: Ranks
) -> list[tuple[Item, Record]]:
    """Like `measure`, in the first of several processes: a thread stores the records that all of them send."""
    items = task.items()
    keys = [task.key(item) for item in items]
    pending = [number for number, key in enumerate(keys) if key not in store]
    failures = list[BaseException]()

    def receive() -> None:
        try:
            done = len(items) - len(pending)
            with ProgressBar(total=len(items), initial=done, desc=task.kind, unit=task.unit) as bar:
                for record in ranks.received(len(pending)):
                    store.add(record)
                    bar.update()
        except BaseException as error:
            failures.append(error)

    ranks.publish(settings, pending)
    receiver = Thread(target=receive, daemon=True)  # ends with the process, even while waiting for a record
    receiver.start()
    measure_share(task, ranks, pending, lambda: bool(failures))
    receiver.join()
    if failures:
        raise failures[0]
    ranks.wait_for_others()
    store.sort(keys)
    return [(item, store[key]) for item, key in zip(items, keys, strict=True)]


def measure_share(task: Task, ranks: Ranks, pending: Sequence[int], failed: Callable[[], bool] = lambda: False) -> None:
    """Measures the items that this process claims, and sends their records; stops if the first process has failed."""
    items = task.items()
    for number in ranks.claims(pending):
        item = items[number]
        ranks.send(encode(task.key(item), _record(task, item)))
        if failed():
            return
    if not ranks.is_first:
        ranks.leave()
