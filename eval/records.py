"""The records of a measurement, kept as they come: started again, it goes on behind them.

A file of lines. The first holds the settings; a start with others is refused, so that no result mixes
two measurements. A line that a kill has cut off is dropped.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Records:
    """Records by key. Without a path nothing is kept on disk.

    Raises `ValueError` where the file was written under other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.done = path, dict[str, dict[str, Any]]()
        if path is None:
            return
        settings = json.loads(json.dumps(settings))  # as they will be read
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _complete_lines(path)
        if lines:
            _check_same(path, lines[0]["settings"], settings)
            self.done = {_name(line["key"]): line["record"] for line in lines[1:]}
        whole = [{"settings": settings}, *lines[1:]]
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")
        partial.replace(path)

    def __contains__(self, key: dict[str, Any]) -> bool:
        return _name(key) in self.done

    def get(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of a key: what the file has, or else what `measure` returns, which is then kept."""
        name = _name(key)
        if name not in self.done:
            record = measure()
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "record": record}) + "\n")
            self.done[name] = json.loads(json.dumps(record))
        return self.done[name]


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    if changed:
        was = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed)
        raise ValueError(f"{path} comes from another measurement: {was}. Pass another --output, or delete the file.")
