"""The five properties, each ablated by degrees, and what their loss costs.

The cost is the relative change of the validation loss, which is the same quantity for all values of a switch: the
next-token loss, or the loss of the predicted noise. Of k heads it is the loss of writing k tokens at a time. It is
paired by seed, at equal steps and at equal operations.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..intervals import bracketed, interval, shown
from ..results import Table, groups_of, run_metadata
from ..results_store import Record
from ..runner import Results
from .digit_quality import held_out_quality, noise_quality
from .experiment import Experiment, figures, means, titles
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
from .training import compared_loss, loss_at, trained_cell

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


class Ablation(Experiment[Cell]):
    """One property."""

    about = (
        "One property of structured autoregressivity, ablated by degrees. The change is that of the validation loss "
        "against the unablated model of the same seed, at equal steps, and at the step where a model has spent as many "
        "operations as the unablated one in all of its steps; a model that spends fewer is read at equal steps. Of k "
        "heads the loss is that of writing k tokens at a time; head 1 alone, as an ordinary model, stands beside it. "
        "Mean over seeds and 95 % t interval."
    )

    def __init__(self, name: str, options: AblationOptions, output: Path):
        super().__init__(options, output)
        self.name = name
        self.kind = f"ablation_{name}"  # type: ignore[misc]  # one class for all properties

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"property": self.name}

    def items(self) -> Sequence[Cell]:
        return cells_of(self.name, range(self.options.seeds), self.options.small)

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
        return {
            "texts": self.setup.text_names,
            "values": values,
            "cells": self.described(measured),
            "real_text": self.real_text(),
            "real_images": held_out_quality(),
            "noise_images": noise_quality(self.setup.size.images),
        }

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [row | cell["quality"] for row, cell in zip(super().rows(results), results["cells"], strict=True)]

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


def percent(changes: Sequence[float] | None) -> str:
    return shown([100 * change for change in changes or ()], 1)


def _at_equal_operations(value: dict[str, Any]) -> str:
    """A model with fewer operations than the unablated one would need more steps than it has."""
    mark = " (at equal steps)" if min(value["operations"]) < 1 else ""
    return percent(value["change_at_equal_operations"]) + mark


def _cost_table(results: Results) -> Table:
    columns = ["model", "variant", "k or share", "validation loss", "change [%]", "at equal operations [%]",
               "head 1 alone [%]", "operations", "parameters"]  # fmt: skip
    groups, rows = groups_of(results["cells"], "model", "variant", "level"), []
    for model in MODELS:
        neutral = groups[model, "", 0]
        parameters = f"{neutral[0]['parameters']:,}"
        rows.append([model, "unablated", "-", shown([c["loss"] for c in neutral]), 0, 0, "-", "1.00", parameters])
        for value in (value for value in results["values"] if value["model"] == model):
            cells = groups[model, value["variant"], value["level"]]
            losses = [c["curve"][-1][compared_loss(c["curve"])] for c in cells]
            rows.append(
                [model, value["variant"] or "-", f"{value['level']:g}", shown(losses),
                 percent(value["change"]), _at_equal_operations(value), percent(value.get("change_of_head_1")),
                 shown(value["operations"], 2), f"{cells[0]['parameters']:,}"]
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
    rows = [[what, "-", "-", *figures(found, names)] for what, found in controls.items()]
    own = [cell for cell in results["cells"] if cell["model"] in models]
    for (model, variant, level), cells in groups_of(own, "model", "variant", "level").items():
        named = [variant or "-", f"{level:g}"] if level else ["unablated", "-"]
        rows.append([model, *named, *means([cell["quality"] for cell in cells], names)])
    what = "generated digits" if models == IMAGES else "generated texts"
    return Table(what, ["model", "variant", "k or share", *titles(names)], rows)


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
            mine = [row for row in rows if row["model"] == model and row["is_main"]]
            main = [row for row in mine if is_seen_by_loss(row["property"], model)]
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
             bracketed(row["frechet_difference"], ".3f") if "frechet_difference" in row else "-"]
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
    return bracketed((row["change"], row["low"], row["high"]), ".1f", unit=100)


def _worst(main: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The costliest of the other variants, where it costs more than the main one."""
    place = main["property"], main["model"]
    others = [row for row in rows if (row["property"], row["model"]) == place and row["variant"] != CONTROL]
    worst = max(others, key=lambda row: row["change"])
    return "-" if worst["is_main"] else f"{worst['variant']}: {_change(worst)}"
