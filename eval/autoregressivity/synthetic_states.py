"""Synthetic states between tokens: n more steps for each token, for a model of the same size and for smaller ones."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .. import runner
from ..intervals import interval, shown
from ..results import Table, picture
from ..results_store import Key, Record
from ..study.training import read_curve, train_alone
from .ablation import changes
from .grid import LANGUAGE
from .options import AblationOptions
from .setup import SMALL as SMALL_SETUP
from .setup import Setup, Size
from .training import count_operations

ABOUT = (
    "Each token is read in n + 1 steps, on the line from the embedding of the token before. The validation loss is "
    "that of the next token at the last step, before which nothing depends on it. Against models without states, of "
    "the same size at equal steps, and of the largest size at equal operations; and against as many steps that repeat "
    "the token. Mean over seeds and 95 % t interval."
)
SIZE = Size(hidden_size=64, layers=2, heads=2, length=64, segment_length=16, steps=300)
SMALL = replace(SMALL_SETUP, steps=6)
# The hidden size with which a model with so many states has the operations of the largest one without.
HIDDEN_SIZES = {0: SIZE.hidden_size, 1: 44, 3: 28}
SMALL_HIDDEN_SIZES = {0: SMALL.hidden_size, 1: 8}
STYLES = (("tab:blue", "-"), ("tab:blue", ":"), ("tab:orange", "-"), ("tab:orange", ":"))
COMPARABLE = 0.5  # operations of a step, of those of the largest model without states


class Cell(NamedTuple):
    """A model to train: a kind, its hidden size, and the states before each token."""

    model: str
    hidden_size: int
    states: int
    path: str
    seed: int


class SyntheticStates(runner.Task[Cell]):
    kind = "ablation_synthetic_states"
    unit = "model"

    def __init__(self, options: AblationOptions, output: Path):
        self.options = options
        self.setup = Setup(options, output / "synthetic_states", SMALL if options.small else SIZE)
        self.hidden_sizes = SMALL_HIDDEN_SIZES if options.small else HIDDEN_SIZES

    def settings(self) -> dict[str, Any]:
        self.setup.make(with_reference=False)
        hidden_sizes = {str(states): size for states, size in self.hidden_sizes.items()}
        return self.setup.described() | {"hidden_sizes": hidden_sizes}

    def items(self) -> Sequence[Cell]:
        largest = self.hidden_sizes[0]
        shapes = [(largest, 0, "line")]
        for states, smaller in self.hidden_sizes.items():
            if states:
                shapes += [(largest, states, "line"), (largest, states, "repeat")]
                shapes += [(smaller, 0, "line"), (smaller, states, "line")]
        return [
            Cell(model, hidden_size, states, path, seed)
            for seed in range(self.options.seeds)
            for model in LANGUAGE
            for hidden_size, states, path in dict.fromkeys(shapes)
        ]

    def key(self, item: Cell) -> Key:
        return item._asdict()

    def measure(self, item: Cell) -> Record:
        """The validation loss by step (`curve`) and at the end, operations of a step, parameters, seconds."""
        output = self.setup.output / "runs" / "-".join(map(str, item))
        model: dict[str, Any] = {"kind": "stock"}
        if item.model == "folded":  # a segment holds as many tokens with states as without
            model = {"kind": "condense", "segment_length": self.setup.size.segment_length * (item.states + 1)}
        model["source"] = str(self.setup.start(item.seed, hidden_size=item.hidden_size))
        objective = {"kind": "synthetic_states", "states": item.states, "path": item.path}
        recipe = self.setup.language_recipe(item.model, objective, item.seed, output, model=model)
        operations, parameters = count_operations(recipe)
        start = time.perf_counter()
        train_alone(recipe)
        seconds = time.perf_counter() - start
        curve = read_curve(output)
        shutil.rmtree(output)
        return {"curve": curve, "loss": curve[-1]["loss"], "operations_per_step": operations,
                "parameters": parameters, "seconds": seconds}  # fmt: skip

    def summarise(self, measured: Sequence[tuple[Cell, Record]]) -> dict[str, Any]:
        groups: dict[tuple[str, int, int, str], list[Record]] = {}  # all seeds of a shape, in their order
        for item, record in measured:
            groups.setdefault(item[:4], []).append(record)
        largest, values = self.hidden_sizes[0], []
        for (model, hidden_size, states, path), cells in groups.items():
            to_largest = _changes(groups[model, largest, 0, "line"], cells)
            is_comparable = states and min(to_largest["operations"]) > COMPARABLE
            has_control = hidden_size == largest and path == "line" and states
            values.append(
                {
                    "model": model,
                    "hidden_size": hidden_size,
                    "states": states,
                    "path": path,
                    "loss": [record["loss"] for record in cells],
                    "parameters": cells[0]["parameters"],
                    "operations": to_largest["operations"],
                    "change_by_states": _changes(groups[model, hidden_size, 0, "line"], cells)["change"]
                    if states
                    else None,
                    "change_at_equal_operations": to_largest["change_at_equal_operations"] if is_comparable else None,
                    "change_by_line": _changes(groups[model, largest, states, "repeat"], cells)["change"]
                    if has_control
                    else None,
                }
            )
        every = [{**item._asdict(), **record} for item, record in measured]
        return {"about": ABOUT, "seeds": self.options.seeds, "values": values, "cells": every}

    def rows(self, results: runner.Results) -> Sequence[dict[str, Any]]:
        return [{name: value for name, value in cell.items() if name != "curve"} for cell in results["cells"]]

    @classmethod
    def tables(cls, results: runner.Results) -> list[Table]:
        columns = ["model", "hidden size", "states", "path", "validation loss", "against none, same size [%]",
                   "against the largest, same operations [%]", "line against repeat [%]", "operations",
                   "parameters"]  # fmt: skip
        rows = [
            [
                value["model"],
                value["hidden_size"],
                value["states"],
                value["path"] if value["states"] else "-",
                shown(value["loss"]),
                *(
                    shown([100 * change for change in value[name] or ()], 1)
                    for name in ("change_by_states", "change_at_equal_operations", "change_by_line")
                ),
                shown(value["operations"], 2),
                f"{value['parameters']:,}",
            ]
            for value in results["values"]
        ]
        return [Table("states between tokens", columns, rows)]

    @classmethod
    def draw(cls, results: runner.Results, path: Path) -> None:
        largest = results["hidden_sizes"]["0"]
        with picture(path, columns=len(LANGUAGE), figsize=(10, 3.8), sharey=True) as panels:
            for panel, model in zip(panels, LANGUAGE, strict=True):
                values = [value for value in results["values"] if value["model"] == model]
                own = [value for value in values if value["hidden_size"] == largest]
                first, smaller = own[0], [value for value in values if value["hidden_size"] < largest]
                bare = [v | {"states": _states_of(results, v)} for v in smaller if not v["states"]]
                curves = (
                    ("largest model", [v for v in own if v["path"] == "line"]),
                    ("largest model, tokens repeated", [first, *(v for v in own if v["path"] == "repeat")]),
                    ("smaller model, equal operations", [first, *(v for v in smaller if v["states"])]),
                    ("the smaller model without states", [first, *bare]),
                )
                for (label, found), (color, style) in zip(curves, STYLES, strict=True):
                    _draw_curve(panel, found, color, style, label)
                panel.set(xlabel="states before each token", ylabel="validation loss of the next token [nats]")
                panel.set_xticks(sorted({value["states"] for value in values}))
                panel.set_title(model, fontsize=10)
                panel.grid(alpha=0.3)
                panel.legend(fontsize=7)


def _changes(others: Sequence[Record], own: Sequence[Record]) -> dict[str, list[float]]:
    """Of models against others of the same seeds."""
    return changes(list(zip(others, own, strict=True)))


def _states_of(results: runner.Results, value: dict[str, Any]) -> int:
    """The states that a smaller model is made for."""
    return next(int(n) for n, size in results["hidden_sizes"].items() if size == value["hidden_size"])


def _draw_curve(panel: Any, values: list[dict], color: str, style: str, label: str) -> None:
    found = [(value["states"], *interval(value["loss"])) for value in values]
    panel.plot([x for x, *_ in found], [y for _, y, *_ in found], color=color, ls=style, marker="o", ms=4, label=label)
    for at, _, low, high in found:
        if low is not None:
            panel.plot([at, at], [low, high], color=color, lw=0.8)
