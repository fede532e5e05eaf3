"""Ablates the five properties by degrees and measures what their loss costs.

The cost is the relative change of the validation loss, which is the same quantity for all values of a switch: the
next-token loss, or the loss of the predicted noise. With k heads it is the loss of writing k tokens at a time. Costs
are paired by seed, at equal steps and at equal operations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from condense.eval.intervals import format_seeds
from condense.eval.results import Table, groups_of
from condense.eval.results_store import Record
from condense.eval.runner import Results

from .digit_quality import held_out_quality, noise_quality
from .experiment import Experiment, figures, means, titles
from .grid import IMAGES, LANGUAGE, MODELS, NEUTRAL, PROPERTIES, Cell, cells_of, is_seen_by_loss, values_of
from .options import AblationOptions
from .pictures import draw_property
from .training import compared_loss, loss_at, trained_cell

BLIND = "the loss of the diffusion model has the same noise levels at any number of steps: see its samples"
TEXT_QUALITY = ("reference_loss", "entropy", "distinct_1", "distinct_2")
IMAGE_QUALITY = ("evaluations", "frechet_distance", "confident", "confidence", "class_entropy")


class Ablation(Experiment[Cell]):
    """The ablation of one property."""

    about = (
        "One property of structured autoregressivity, ablated by degrees. The change compares the validation loss with "
        "the unablated model of the same seed: at equal steps, and at the step where a model has spent as many "
        "operations as the unablated one in all its steps. A model that spends fewer is read at equal steps. With k "
        "heads the loss is that of writing k tokens at a time; head 1 as an ordinary model stands beside it. Mean over "
        "seeds and 95 % t interval."
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
    """Returns relative changes of the loss by seed, from pairs of an unablated and an ablated model.

    `change` compares the loss as generated, if there is one, and `change_of_head_1` the next-token loss.
    `frechet_difference` is a difference, not a relative change.
    """
    found: dict[str, list[float]] = {"change": [], "change_at_equal_operations": [], "operations": []}
    for neutral, ablated in pairs:
        ratio = ablated["operations_per_step"] / neutral["operations_per_step"]
        curve, name = ablated["curve"], compared_loss(ablated["curve"])
        step = curve[-1]["step"] / max(ratio, 1.0)  # a cheaper model has no steps beyond the last
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
    return format_seeds([100 * change for change in changes or ()], 1)


def _at_equal_operations(value: dict[str, Any]) -> str:
    """Formats the change at equal operations. A model with fewer operations would need more steps than it has."""
    mark = " (at equal steps)" if min(value["operations"]) < 1 else ""
    return percent(value["change_at_equal_operations"]) + mark


def _cost_table(results: Results) -> Table:
    columns = ["model", "variant", "k or share", "validation loss", "change [%]", "at equal operations [%]",
               "head 1 alone [%]", "operations", "parameters"]  # fmt: skip
    groups, rows = groups_of(results["cells"], "model", "variant", "level"), []
    for model in MODELS:
        neutral = groups[model, "", 0]
        parameters = f"{neutral[0]['parameters']:,}"
        rows.append(
            [model, "unablated", "-", format_seeds([c["loss"] for c in neutral]), 0, 0, "-", "1.00", parameters]
        )
        for value in (value for value in results["values"] if value["model"] == model):
            cells = groups[model, value["variant"], value["level"]]
            losses = [c["curve"][-1][compared_loss(c["curve"])] for c in cells]
            rows.append(
                [model, value["variant"] or "-", f"{value['level']:g}", format_seeds(losses),
                 percent(value["change"]), _at_equal_operations(value), percent(value.get("change_of_head_1")),
                 format_seeds(value["operations"], 2), f"{cells[0]['parameters']:,}"]
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
