"""The records of a measurement, written as they are measured, so a stopped measurement can resume.

The first of the JSON lines holds the settings. A start with other settings is refused, so no result mixes two
measurements. Models may be added because each has its own records. A line cut off by a kill is dropped.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from condense.training.output_lock import output_lock
from condense.utils.files import append_line, atomic_file, check_not_linked, check_output_folder, naming_file

RESUMES = "Make room, and start the same command again: it measures nothing twice."

Key = dict[str, Any]
Record = dict[str, Any]


@contextmanager
def open_results_store(path: Path, settings: dict[str, Any]) -> Iterator["ResultsStore"]:
    """Opens the store in a file and locks it against other processes.

    Raises `ValueError` if another process holds the lock, the file has other settings, or a file of the measurement is
    a link.
    """
    check_output_folder(path.parent)
    kind = path.name.removesuffix(".records.jsonl")
    check_not_linked(*path.parent.glob(f"{kind}.*"), *path.parent.glob(f".{kind}.*"))  # before anything is measured
    with ExitStack() as locked:
        with naming_file(path, RESUMES):
            locked.enter_context(output_lock(path.parent, kind))
            store = ResultsStore(path, settings)
        yield store


class ResultsStore:
    """Records by key: see `open_results_store`. Without a path, they are kept only in memory."""

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.done, self.num_found = path, dict[str, Record](), 0  # num_found: in the file
        if path is None:
            return
        settings = json.loads(json.dumps(settings))  # as they will be read back
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _complete_lines(path)
        if lines:
            before = lines[0]["settings"]
            if changed := "; ".join(_differences("", before, without_added(before, settings))):
                remedy = "Pass another --output, or delete the file."
                raise ValueError(f"{path} comes from another measurement: {changed}. {remedy}")
            self.done = {_name(line["key"]): line["record"] for line in lines[1:]}
            self.num_found = len(self.done)
        self.settings = settings
        self._write()

    def _write(self) -> None:
        assert self.path is not None
        records = ({"key": json.loads(name), "record": record} for name, record in self.done.items())
        lines = [{"settings": self.settings}, *records]
        with atomic_file(self.path, RESUMES) as file:
            file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def sort(self, keys: Sequence[Key]) -> None:
        """Sorts the records in the order of these keys, after all other records in their present order."""
        names = [_name(key) for key in keys]
        others = [name for name in self.done if name not in set(names)]
        ordered = {name: self.done[name] for name in [*others, *names]}
        if list(ordered) != list(self.done):
            self.done = ordered
            if self.path is not None:
                self._write()

    def __contains__(self, key: Key) -> bool:
        return _name(key) in self.done

    def __getitem__(self, key: Key) -> Record:
        return self.done[_name(key)]

    def get(self, key: Key, measure: Callable[[], Record]) -> Record:
        """Returns the stored record of a key; if there is none, stores and returns the result of `measure`."""
        if key not in self:
            self.add(encode(key, measure()))
        return self[key]

    def add(self, line: str) -> None:
        """Stores a record in the form of `encode`."""
        if self.path is not None:
            append_line(self.path, line)
        found = json.loads(line)
        self.done[_name(found["key"])] = found["record"]


def encode(key: Key, record: Record) -> str:
    """Returns the line of a record. Raises `ValueError` for a number that is not finite."""
    try:
        return json.dumps({"key": dict(sorted(key.items())), "record": record}, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"the measurement of {_format_key(key)} gave a value that is not finite: check the model's weights, or use "
            "another dtype."
        ) from error


def stored_settings(path: Path) -> dict[str, Any]:
    """Returns the settings stored in a file, if it exists. Raises `ValueError` if it is damaged."""
    lines = _complete_lines(path)
    return lines[0]["settings"] if lines else {}


def without_added(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings to compare, without models that were added."""
    known, given = ([model["name"] for model in found.get("models", ())] for found in (before, now))
    added = set(given) - set(known)
    if not added or not set(known) <= set(given):
        return now
    found = {
        field: {name: one for name, one in value.items() if name not in added} if isinstance(value, dict) else value
        for field, value in now.items()
    }
    found["models"] = sorted(
        (model for model in now["models"] if model["name"] not in added), key=lambda model: known.index(model["name"])
    )
    if "chat" in found:
        found["chat"] = [name for name in found["chat"] if name not in added]
    return found


def _format_key(key: Key) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in key.items())


def _name(key: Key) -> str:
    return json.dumps(key, sort_keys=True)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError:
        found = [None]
    fields = [("settings",), *[("key", "record")] * len(found)]
    if not all(
        isinstance(line, dict) and all(isinstance(line.get(field), dict) for field in wanted)
        for line, wanted in zip(found, fields, strict=False)
    ):
        raise ValueError(f"{path} is damaged, its lines are not records: delete it, or pass another --output.")
    return found


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yields the fields that differ, at any depth: `models.0.dtype was ... and is ...`."""
    if _holds_objects(before) and _holds_objects(now):
        if len(before) != len(now):
            yield f"the length of {name} was {len(before)} and is {len(now)}"
            return
        before, now = ({str(place): value for place, value in enumerate(values)} for values in (before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        for field in before | now:
            place = f"{name}.{field}" if name else field
            if field in before:
                yield from _differences(place, before[field], now.get(field))
            elif now[field] is not None:  # such as by an earlier version
                yield f"{place} was not recorded and is {now[field]!r}"
    elif before != now:
        yield f"{name} was {before!r} and is {now!r}"


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
