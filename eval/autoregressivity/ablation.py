"""The five properties, each ablated by degrees, and what their loss costs.

The cost is the relative change of the validation loss, which is the same quantity for all values of a switch: the
next-token loss, or the loss of the predicted noise. Of k heads it is the loss of writing k tokens at a time. It is
paired by seed, at equal steps and at equal operations.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..intervals import interval, shown
from ..options import stored
from ..results import Table, run_metadata
from ..results_store import Key, Record
from ..runner import Results, Task
from .digit_quality import held_out_quality, noise_quality
from .grid import (
    CONTROL,
    IMAGES,
    LANGUAGE,
    MODELS,
    NEUTRAL,
    PROPERTIES,
    Cell,
    cells_of,
    is_halved,
    is_seen_by_loss,
    values_of,
)
from .options import AblationOptions
from .pictures import draw_property
from .setup import Setup
from .text_quality import text_quality
from .training import compared_loss, loss_at, trained_cell

ABOUT = (
    "One property of structured autoregressivity, ablated by degrees. The change is that of the validation loss "
    "against the unablated model of the same seed, at equal steps, and at the step where a model has spent as many "
    "operations as the unablated one in all of its steps; a model that spends fewer is read at equal steps. Of k heads "
    "the loss is that of writing k tokens at a time; head 1 alone, as an ordinary model, stands beside it. Mean over "
    "seeds and 95 % t interval."
)
SUMMARY_ABOUT = (
    "The relative change of the validation loss where a property is halved, against the unablated model of the same "
    "seed. Half of one thing has no common unit with half of another: the ranks say which of these ablations costs "
    "more, not which property matters more. Rank 1 has the largest cost; properties whose 95 % intervals overlap share "
    "a range of ranks. The loss of the diffusion model does not see its number of steps, which has no rank: the "
    "Fréchet distance of its samples does. The variant `fresh` is a control: each time, other targets are missing."
)
BLIND = "the loss of the diffusion model has the same noise levels at any number of steps: see its samples"
TEXT_QUALITY = ("reference_loss", "entropy", "distinct_1", "distinct_2")
IMAGE_QUALITY = ("evaluations", "frechet_distance", "confident", "confidence", "class_entropy")


class Ablation(Task[Cell]):
    """One property."""

    unit = "model"

    def __init__(self, name: str, options: AblationOptions, output: Path):
        self.name, self.options, self.setup = name, options, Setup(options, output)
        self.kind = f"ablation_{name}"  # type: ignore[misc]  # one class for all properties

    def settings(self) -> dict[str, Any]:
        self.setup.make()
        return stored(self.options) | {"property": self.name} | self.setup.described_with_judge()

    def items(self) -> Sequence[Cell]:
        return cells_of(self.name, range(self.options.seeds), self.options.small)

    def key(self, item: Cell) -> Key:
        return item._asdict()

    def measure(self, item: Cell) -> Record:
        return trained_cell(item, self.setup)

    def summarise(self, measured: Sequence[tuple[Cell, Record]]) -> dict[str, Any]:
        records = dict(measured)
        values = []
        for model in MODELS:
            for value in values_of(self.name, model, self.options.small):
                pairs = [
                    (records[Cell(NEUTRAL, model, "", 0, seed)], records[Cell(self.name, model, *value[:2], seed)])
                    for seed in range(self.options.seeds)
                ]
                values.append({"model": model, "variant": value.variant, "level": value.level} | changes(pairs))
        prompts, size = self.setup.prompts, self.setup.size
        return {
            "about": ABOUT,
            "texts": self.setup.text_names,
            "seeds": self.options.seeds,
            "values": values,
            "cells": [{**cell._asdict(), **record} for cell, record in measured],
            "real_text": text_quality(self.setup.reference(), prompts, size.prompt_length),
            "real_images": held_out_quality(),
            "noise_images": noise_quality(size.images),
        }

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [
            {name: value for name, value in cell.items() if name not in ("curve", "quality")} | cell["quality"]
            for cell in results["cells"]
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        return [_cost_table(results), _quality_table(results, LANGUAGE), _quality_table(results, IMAGES)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        draw_property(results, path)


def changes(pairs: Sequence[tuple[Record, Record]]) -> dict[str, list[float]]:
    """Relative changes of the loss by seed, from pairs of an unablated and an ablated model.

    `change` is that of the loss as generated where there is one, and `change_of_head_1` that of the next-token loss.
    `frechet_difference` is a difference, not a relative change.
    """
    found: dict[str, list[float]] = {"change": [], "change_at_equal_operations": [], "operations": []}
    for neutral, ablated in pairs:
        ratio = ablated["operations_per_step"] / neutral["operations_per_step"]
        curve, name = ablated["curve"], compared_loss(ablated["curve"])
        step = curve[-1]["step"] / max(ratio, 1.0)  # no curve has steps beyond the last
        found["change"].append(curve[-1][name] / neutral["loss"] - 1)
        found["change_at_equal_operations"].append(loss_at(curve, step, name) / neutral["loss"] - 1)
        found["operations"].append(ratio)
        if "frechet_distance" in ablated.get("quality", {}):
            difference = ablated["quality"]["frechet_distance"] - neutral["quality"]["frechet_distance"]
            found.setdefault("frechet_difference", []).append(difference)
        if name != "loss":
            found.setdefault("change_of_head_1", []).append(ablated["loss"] / neutral["loss"] - 1)
    return found


def _percent(values: Sequence[float]) -> str:
    return shown([100 * value for value in values], 1)


def _at_equal_operations(value: dict[str, Any]) -> str:
    """A model with fewer operations than the unablated one would need more steps than it has."""
    mark = " (at equal steps)" if min(value["operations"]) < 1 else ""
    return _percent(value["change_at_equal_operations"]) + mark


def _cost_table(results: Results) -> Table:
    columns = ["model", "variant", "k or share", "validation loss", "change [%]", "at equal operations [%]",
               "head 1 alone [%]", "operations", "parameters"]  # fmt: skip
    rows = []
    for model in MODELS:
        of_model = [cell for cell in results["cells"] if cell["model"] == model]
        neutral = [cell for cell in of_model if cell["ablated"] == NEUTRAL]
        rows.append([model, "unablated", "-", shown([c["loss"] for c in neutral]), 0, 0, "-", "1.00",
                     f"{neutral[0]['parameters']:,}"])  # fmt: skip
        for value in (value for value in results["values"] if value["model"] == model):
            cells = [c for c in of_model if c["ablated"] != NEUTRAL
                     and (c["variant"], c["level"]) == (value["variant"], value["level"])]  # fmt: skip
            head_1 = value.get("change_of_head_1")
            losses = [c["curve"][-1][compared_loss(c["curve"])] for c in cells]
            rows.append(
                [model, value["variant"] or "-", f"{value['level']:g}", shown(losses),
                 _percent(value["change"]), _at_equal_operations(value),
                 "-" if head_1 is None else _percent(head_1), shown(value["operations"], 2),
                 f"{cells[0]['parameters']:,}"]
            )  # fmt: skip
    name = results["property"]
    title = f"{name.replace('_', ' ')}: {PROPERTIES[name]}"
    if not all(is_seen_by_loss(name, model) for model in MODELS):
        title += f"; {BLIND}"
    return Table(title, columns, rows)


def _quality_table(results: Results, models: Sequence[str]) -> Table:
    names = IMAGE_QUALITY if models == IMAGES else TEXT_QUALITY
    real = results["real_images" if models == IMAGES else "real_text"]
    controls = {"real": real} | ({"noise": results["noise_images"]} if models == IMAGES else {})
    rows: list[list[Any]] = [
        [what, "-", "-", *(f"{found[name]:.3f}" if name in found else "-" for name in names)]
        for what, found in controls.items()
    ]
    groups: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for cell in results["cells"]:
        if cell["model"] in models:
            groups.setdefault((cell["model"], cell["variant"], cell["level"]), []).append(cell["quality"])
    for (model, variant, level), found in groups.items():
        cells = [shown([quality[name] for quality in found], 0 if name == "evaluations" else 3) for name in names]
        rows.append([model, variant or ("-" if level else "unablated"), f"{level:g}" if level else "-", *cells])
    what = "generated digits" if models == IMAGES else "generated texts"
    return Table(what, ["model", "variant", "k or share", *(name.replace("_", " ") for name in names)], rows)


class Summary:
    """All five properties side by side, where each is halved."""

    @classmethod
    def of(cls, results: dict[str, Results]) -> Results:
        """From the results of the properties by name."""
        rows = []
        for name, found in results.items():
            for model in MODELS:
                halved = [value for value in found["values"] if value["model"] == model and is_halved(value["level"])]
                for value in halved:
                    mean, low, high = interval(value["change"])
                    at_equal, *_ = interval(value["change_at_equal_operations"])
                    row = {"property": name, "model": model, "variant": value["variant"], "change": mean,
                           "low": low, "high": high, "change_at_equal_operations": at_equal,
                           "is_main": value is halved[0]}  # fmt: skip
                    if "frechet_difference" in value:
                        row["frechet_difference"] = interval(value["frechet_difference"])
                    rows.append(row)
        for model in MODELS:
            main = [
                row
                for row in rows
                if row["model"] == model and row["is_main"] and is_seen_by_loss(row["property"], model)
            ]
            for row in main:
                row["ranks"] = _ranks(row, main)
        seeds = min(found["seeds"] for found in results.values())
        return {"kind": "ablation", **run_metadata(), "about": SUMMARY_ABOUT, "seeds": seeds, "rows": rows}

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        columns = ["property, halved"]
        columns += [text for model in MODELS for text in (f"{model}: rank", "change [%]", "worst variant [%]")]
        by_place = {(row["property"], row["model"]): row for row in results["rows"] if row["is_main"]}

        def mean_rank(name: str) -> float:
            ranks = [row["ranks"] for model in MODELS if "ranks" in (row := by_place[name, model])]
            return fmean(sum(first_and_last) for first_and_last in ranks)

        rows = []
        for name in sorted(PROPERTIES, key=mean_rank):
            cells = []
            for model in MODELS:
                row = by_place[name, model]
                cells += [_rank(row), _change(row), _worst(row, results["rows"])] if "ranks" in row else ["-"] * 3
            rows.append([name.replace("_", " "), *cells])
        others = [
            [row["property"].replace("_", " "), row["model"], row["variant"] or "-", _change(row),
             f"{100 * row['change_at_equal_operations']:.1f}",
             _with_interval(row["frechet_difference"], 3) if "frechet_difference" in row else "-"]
            for row in results["rows"]
        ]  # fmt: skip
        return [
            Table("what it costs to halve each property", columns, rows),
            Table("every way to halve it", ["property", "model", "variant", "change [%]", "at equal operations [%]",
                                            "Fréchet distance, difference"], others),
        ]  # fmt: skip


def _ranks(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """The first and the last rank that the intervals leave open; of single values without intervals, one rank."""

    def bounds(one: dict[str, Any]) -> tuple[float, float]:
        return (one["change"], one["change"]) if one["low"] is None else (one["low"], one["high"])

    low, high = bounds(row)
    above = sum(bounds(other)[0] > high for other in rows)
    below = sum(bounds(other)[1] < low for other in rows)
    return above + 1, len(rows) - below


def _rank(row: dict[str, Any]) -> str:
    first, last = row["ranks"]
    return f"{first}" if first == last else f"{first}-{last}"


def _change(row: dict[str, Any]) -> str:
    return _with_interval([None if n is None else 100 * n for n in (row["change"], row["low"], row["high"])], 1)


def _worst(main: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The costliest of the other variants, where it costs more than the main one."""
    place = main["property"], main["model"]
    others = [row for row in rows if (row["property"], row["model"]) == place and row["variant"] != CONTROL]
    worst = max(others, key=lambda row: row["change"])
    return "-" if worst["is_main"] else f"{worst['variant']}: {_change(worst)}"


def _with_interval(found: Sequence[float | None], digits: int) -> str:
    """A mean, and the ends of its interval where it has one."""
    mean, low, high = (None if number is None else f"{number:.{digits}f}" for number in found)
    return f"{mean}" if low is None else f"{mean} [{low}, {high}]"
