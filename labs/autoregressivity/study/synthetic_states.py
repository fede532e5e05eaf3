"""Measures synthetic states between tokens: n more steps for each token, in models of the same size and smaller."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from condense.eval.intervals import format_seeds, interval
from condense.eval.results import Table, groups_of, picture
from condense.eval.results_store import Record
from condense.eval.runner import Results
from condense.eval.study.training import PAPERS_MEMORY, read_curve

from .ablation import changes, percent
from .experiment import Experiment
from .grid import LANGUAGE
from .options import AblationOptions
from .pictures import draw_bounds, draw_curve
from .setup import SMALL as SMALL_SETUP
from .setup import Setup, Size, trained_folder
from .training import count_operations

SIZE = Size(hidden_size=64, layers=2, heads=2, length=64, segment_length=16, steps=300)
SMALL = replace(SMALL_SETUP, steps=6)
# By the number of states: the hidden size of a model with the operations of the largest model without states.
HIDDEN_SIZES = {0: SIZE.hidden_size, 1: 44, 3: 28}
SMALL_HIDDEN_SIZES = {0: SMALL.hidden_size, 1: 8}
STYLES = (("tab:blue", "-"), ("tab:blue", ":"), ("tab:orange", "-"), ("tab:orange", ":"))
SHAPE = ("model", "hidden_size", "states", "path")  # the fields of a cell without the seed
CHANGES = ("change_by_states", "change_at_equal_operations", "change_by_line")
COMPARABLE = 0.5  # the least operations of a step, over those of the largest model without states


class Cell(NamedTuple):
    """A model to train: a kind, its hidden size, and the states before each token."""

    model: str
    hidden_size: int
    states: int
    path: str
    seed: int


class SyntheticStates(Experiment[Cell]):
    kind = "ablation_synthetic_states"
    about = (
        "Each token is read in n + 1 steps, on the line from the embedding of the token before. The validation loss is "
        "the next token's loss at the last step, before which nothing depends on it. Compared are models without "
        "states, of the same size at equal steps and of the largest size at equal operations; and models that repeat "
        "the token in as many steps. Mean over seeds and 95 % t interval."
    )

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

    def measure(self, item: Cell) -> Record:
        """Returns the validation loss by step (`curve`) and at the end, operations of a step, parameters, seconds."""
        output = self.setup.runs / "-".join(map(str, item))
        model: dict[str, Any] = {"kind": "stock"}
        if item.model == "folded":  # a segment holds as many tokens with states as without
            length = self.setup.size.segment_length * (item.states + 1)
            model = {"kind": "condense", "segment_length": length, **PAPERS_MEMORY}
        model["source"] = str(self.setup.start(item.seed, hidden_size=item.hidden_size))
        objective = {"kind": "synthetic_states", "states": item.states, "path": item.path}
        recipe = self.setup.language_recipe(item.model, objective, item.seed, output, model=model)
        operations, parameters = count_operations(recipe)
        start = time.perf_counter()
        with trained_folder(recipe):
            seconds = time.perf_counter() - start
            curve = read_curve(output)
        return {"curve": curve, "loss": curve[-1]["loss"], "operations_per_step": operations,
                "parameters": parameters, "seconds": seconds}  # fmt: skip

    def summarise(self, measured: Sequence[tuple[Cell, Record]]) -> dict[str, Any]:
        cells = self.described(measured)
        groups, largest, values = groups_of(cells, *SHAPE), self.hidden_sizes[0], []  # a group has all seeds of a shape
        for shape, own in groups.items():
            model, hidden_size, states, path = shape

            def against(*other: Any, model: str = model, own: list[Record] = own) -> dict[str, list[float]]:
                return changes(list(zip(groups[model, *other], own, strict=True)))

            to_largest = against(largest, 0, "line")
            has_control = hidden_size == largest and path == "line" and states
            value: dict[str, Any] = dict(zip(SHAPE, shape, strict=True)) | {
                "loss": [record["loss"] for record in own],
                "parameters": own[0]["parameters"],
                "operations": to_largest["operations"],
                **dict.fromkeys(CHANGES),
            }
            if states:
                value["change_by_states"] = against(hidden_size, 0, "line")["change"]
                if min(to_largest["operations"]) > COMPARABLE:
                    value["change_at_equal_operations"] = to_largest["change_at_equal_operations"]
            if has_control:
                value["change_by_line"] = against(largest, states, "repeat")["change"]
            values.append(value)
        return {"values": values, "cells": cells}

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        columns = ["model", "hidden size", "states", "path", "validation loss", "against none, same size [%]",
                   "against the largest, same operations [%]", "line against repeat [%]", "operations",
                   "parameters"]  # fmt: skip
        rows = [
            [
                value["model"],
                value["hidden_size"],
                value["states"],
                value["path"] if value["states"] else "-",
                format_seeds(value["loss"]),
                *(percent(value[name]) for name in CHANGES),
                format_seeds(value["operations"], 2),
                f"{value['parameters']:,}",
            ]
            for value in results["values"]
        ]
        return [Table("states between tokens", columns, rows)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
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


def _states_of(results: Results, value: dict[str, Any]) -> int:
    """Returns the number of states that a smaller model is made for."""
    return next(int(n) for n, size in results["hidden_sizes"].items() if size == value["hidden_size"])


def _draw_curve(panel: Any, values: list[dict], color: str, style: str, label: str) -> None:
    places, found = [value["states"] for value in values], [interval(value["loss"]) for value in values]
    draw_curve(panel, places, found, band=0, color=color, ls=style, label=label)
    draw_bounds(panel, places, found, color=color, lw=0.8)
