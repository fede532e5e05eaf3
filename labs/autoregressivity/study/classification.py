"""Compares direct digit classifiers with one that walks to the label in T steps with shared weights."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from condense.eval.intervals import LOG, LOGIT, Scale, format_seeds, interval
from condense.eval.results import Table, groups_of, picture
from condense.eval.results_store import Record
from condense.eval.runner import Results

from .experiment import Experiment
from .options import AblationOptions
from .pictures import draw_curve, log_scale, scale
from .walking_classifier import (
    SMALL,
    ClassifierSize,
    Forcing,
    blocks_of_equal_operations,
    load,
    quality,
    shuffled_labels,
    train_classifier,
)

WALK, FREE, DEEP, SHUFFLED = "walk", "free-running walk", "direct, deeper", "walk, shuffled labels"
STEPS = {WALK: (1, 2, 4, 8, 16), FREE: (2, 4, 8, 16), DEEP: (2, 4, 8, 16), SHUFFLED: (1, 4, 16)}
SMALL_STEPS = {WALK: (1, 2), FREE: (2,), DEEP: (2,), SHUFFLED: (2,)}
COLORS = {WALK: "tab:blue", FREE: "tab:orange", DEEP: "tab:green"}


class Cell(NamedTuple):
    """A classifier to train. It walks in `steps` steps; a deeper direct classifier has the operations of that walk."""

    classifier: str
    steps: int
    seed: int


class Classification(Experiment[Cell]):
    kind = "ablation_classification"
    about = (
        "A classifier of digits walks from the uniform vector to the label in T steps with shared weights, trained on "
        "true states. It is compared with a direct classifier of the same parameters (T = 1), and with deeper ones "
        "that have the operations of the walk. Controls: its own states in training, and shuffled labels. 360 held-out "
        "images; mean over seeds and 95 % t interval."
    )

    def __init__(self, options: AblationOptions, output: Path):
        super().__init__(options, output)
        self.size = SMALL if options.small else ClassifierSize()
        self.steps = SMALL_STEPS if options.small else STEPS

    def settings(self) -> dict[str, Any]:
        return {"size": asdict(self.size)}

    def items(self) -> Sequence[Cell]:
        return [
            Cell(classifier, number, seed)
            for seed in range(self.options.seeds)
            for classifier, numbers in self.steps.items()
            for number in numbers
        ]

    def measure(self, item: Cell) -> Record:
        start, training = time.perf_counter(), load(held_out=False)
        if item.classifier == SHUFFLED:
            training = shuffled_labels(training, item.seed)
        is_deep = item.classifier == DEEP
        blocks = blocks_of_equal_operations(self.size, item.steps) if is_deep else self.size.blocks
        forcing: Forcing = "own" if item.classifier == FREE else "true"
        steps = 1 if is_deep else item.steps
        network, operations = train_classifier(training, self.size, blocks, steps, forcing, item.seed)
        return quality(network, load(held_out=True), steps) | {
            "operations_per_step": operations,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "seconds": time.perf_counter() - start,
        }

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        groups = _groups(results)
        direct = groups[WALK, 1]
        columns = ["classifier", "T", "accuracy [%]", "loss", "against direct [points]", "against deeper [points]",
                   "after step 1 [%]", "other images after step 1 [%]", "operations", "parameters"]  # fmt: skip
        rows = []
        for (classifier, steps), cells in groups.items():
            is_walk = classifier in (WALK, FREE) and steps > 1
            rows.append(
                [
                    "direct" if (classifier, steps) == (WALK, 1) else classifier,
                    steps,
                    _percent(cells, "accuracy"),
                    format_seeds([cell["loss"] for cell in cells], scale=LOG),
                    _points(cells, direct) if is_walk or classifier == DEEP else "-",
                    _points(cells, groups[DEEP, steps]) if is_walk else "-",
                    format_seeds([100 * cell["accuracies"][0] for cell in cells], 1) if is_walk else "-",
                    _percent(cells, "accuracy_other_images") if is_walk else "-",
                    f"{cells[0]['operations_per_step'] / direct[0]['operations_per_step']:.2f}",
                    f"{cells[0]['parameters']:,}",
                ]
            )
        return [Table("a walk from the uniform vector to the label, T steps", columns, rows)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        from matplotlib.ticker import MaxNLocator

        groups = _groups(results)
        with picture(path, columns=3, figsize=(13, 3.8)) as (errors, losses, by_step):
            _draw_by_steps(errors, groups, "accuracy", LOGIT, 100)
            errors.set_ylabel("accuracy on held-out images [%]")
            _draw_by_steps(losses, groups, "loss", LOG)
            losses.set_ylabel("loss on held-out images")
            log_scale(losses)
            longest = max(steps for classifier, steps in groups if classifier == WALK)
            for classifier in (WALK, FREE):
                columns = zip(*(cell["accuracies"] for cell in groups[classifier, longest]), strict=True)
                found = [interval(column, LOGIT) for column in columns]
                _draw_line(by_step, list(range(1, longest + 1)), found, classifier, 100)
            by_step.xaxis.set_major_locator(MaxNLocator(integer=True))
            by_step.set_xlabel(f"steps taken, of T = {longest}")
            by_step.set_ylabel("accuracy of the likeliest class [%]")
            for panel in (errors, losses, by_step):
                panel.grid(alpha=0.3)
                panel.legend(fontsize=8)


def _groups(results: Results) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Returns the cells of all seeds, by classifier and steps."""
    cells = sorted(results["cells"], key=lambda cell: (list(STEPS).index(cell["classifier"]), cell["steps"]))
    return groups_of(cells, "classifier", "steps")


def _percent(cells: Sequence[dict[str, Any]], name: str) -> str:
    """Formats a mean share and its interval, which stays within 0 to 100 %."""
    return format_seeds([cell[name] for cell in cells], 1, LOGIT, unit=100)


def _points(cells: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> str:
    """Formats the difference in accuracy, paired by seed."""
    return format_seeds(
        [100 * (cell["accuracy"] - other["accuracy"]) for cell, other in zip(cells, others, strict=True)], 1
    )


def _draw_by_steps(panel: Any, groups: dict, name: str, scale: Scale, unit: float = 1) -> None:
    for classifier in COLORS:
        numbers = [steps for other, steps in groups if other == classifier or (other, steps) == (WALK, 1)]
        cells = [groups.get((classifier, steps)) or groups[WALK, 1] for steps in numbers]
        found = [interval([cell[name] for cell in group], scale) for group in cells]
        _draw_line(panel, numbers, found, classifier, unit)
    every = sorted({steps for _, steps in groups})
    panel.set_xscale("log", base=2)
    panel.set_xticks(every, [str(steps) for steps in every])
    panel.set_xlabel("steps T, or the operations of as many")


def _draw_line(panel: Any, places: list[int], found: list, label: str, unit: float) -> None:
    draw_curve(panel, places, scale(found, unit), color=COLORS[label], label=label)
