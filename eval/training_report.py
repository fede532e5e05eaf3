"""Training runs in a report: their curves and everything they logged.

`training.json` and `training.csv` hold every logged line; the pictures beside them begin with `training`.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from condense.utils.files import read_text

from .charts import finish
from .results import Table, picture, set_log_scale, write_results

GIB = 2**30
SEGMENT = "loss_segment_"
MEMORY = {
    "peak_cuda_bytes": "GPU memory in tensors",
    "reserved_cuda_bytes": "GPU memory held by the allocator",
    "peak_resident_bytes": "resident memory of the process (CPU)",
}  # the peak so far, on the first rank
COLUMNS = {
    "name": "run",
    "steps": "steps",
    "segments": "longest text [segments]",
    "loss": "loss, mean of the last ten lines",
    "validation": "last validation loss",
    "reference": "the paper's validation loss",
    "accuracy": "right answers in validation",
    "speed": "tokens per second, median",
    "memory": "most memory of the first rank",
}

Line = dict[str, float]
Run = dict[str, Any]


def read_run(path: Path, folder: Path) -> Run | None:
    """Returns a run's table cells and logged lines; None if nothing has been logged yet."""
    lines = [json.loads(line) for line in read_text(path).splitlines(keepends=True) if line.endswith("\n")]
    losses = [line for line in lines if "loss" in line]
    if not losses:
        return None
    validations = [line for line in lines if "eval_loss" in line]
    for line in [*losses, *validations]:
        needed = ["step", "eval_loss"]
        if "loss" in line:
            needed = ["step", "loss", "segments" if "segments" in line else "learning_rate"]
        if wrong := [name for name in needed if not isinstance(line.get(name), int | float)]:
            raise ValueError(f"a line has no number {wrong[0]}")
    validation: Line = validations[-1] if validations else {}
    speeds = [line["tokens_per_second"] for line in losses if "tokens_per_second" in line]
    return {
        "name": str(path.parent.relative_to(folder)) if path.parent != folder else folder.resolve().name,
        "lines": losses,
        "validations": validations,
        "steps": f"{losses[-1]['step']:,}",
        "loss": f"{sum(line['loss'] for line in losses[-10:]) / len(losses[-10:]):.4f}",
        "segments": losses[-1].get("segments", ""),
        "validation": f"{validation['eval_loss']:.4f}" if validation else "",
        "reference": _reference_loss(path.with_name("recipe.json")),
        "accuracy": next((f"{share:.1%}" for name, share in validation.items() if name.endswith("_accuracy")), ""),
        "speed": f"{median(speeds):,.0f}" if speeds else "",
        "memory": _most_memory(losses),
    }


def _reference_loss(recipe: Path) -> str:
    """Returns the validation loss that a run's recipe gives for comparison; empty if it gives none."""
    if recipe.is_symlink():
        raise ValueError(f"{recipe.name} beside it is a link")
    if not recipe.exists():
        return ""
    reference = (json.loads(read_text(recipe)).get("evaluation") or {}).get("reference_loss")
    return "" if reference is None else f"{reference:g}"


def _most_memory(lines: Sequence[Line]) -> str:
    for name, what in MEMORY.items():
        if found := [line[name] for line in lines if name in line]:
            return f"{max(found) / GIB:.2f} GiB, {what}"
    return ""


def runs_table(runs: Sequence[Run]) -> Table:
    shown = [name for name in COLUMNS if any(run[name] != "" for run in runs)]
    return Table("runs", [COLUMNS[name] for name in shown], [[run[name] for name in shown] for run in runs])


def write_training(runs: Sequence[Run], path: Path) -> list[Path]:
    """Writes `path`.json, `path`.csv and the pictures, and returns their paths."""
    records = [
        {"run": run["name"], **{name: _finite(value) for name, value in line.items()}}
        for run in runs
        for line in sorted([*run["lines"], *run["validations"]], key=lambda line: line["step"])
    ]
    write_results(path, {"kind": "training", "memory": MEMORY, "lines": records}, records)
    drawn = {"": (_draw_losses, runs)}
    if any(run["validations"] for run in runs):
        drawn["-validation"] = _draw_validation, runs
    if by_segment := [run for run in runs if any(_segments(run["lines"]))]:
        drawn["-segments"] = _draw_segments, by_segment
    if any("tokens_per_second" in line for run in runs for line in run["lines"]):
        drawn["-speed"] = _draw_speed, runs
    for suffix, (draw, shown) in drawn.items():
        draw(shown, path.with_name(f"{path.name}{suffix}"))
    return [path.with_name(f"{path.name}{suffix}.png") for suffix in drawn]


def _finite(value: Any) -> Any:
    """Replaces infinity, which JSON lacks: DeepSpeed logs it as the gradient norm of a skipped step."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw_losses(runs: Sequence[Run], path: Path) -> None:
    """Draws losses beside the lengths of curricula's texts and the learning rates of other runs."""
    growing = [run for run in runs if all("segments" in line for line in run["lines"])]
    others = [run for run in runs if run not in growing]
    every = [
        ("loss", "training loss", runs),
        ("learning_rate", "learning rate", others),
        ("segments", "length of the text [segments]", growing),
    ]
    drawn = [one for one in every if one[2]]
    with picture(path, columns=len(drawn), figsize=(5 * len(drawn), 3.2)) as panels:
        for axes, (name, title, shown) in zip(panels, drawn, strict=True):
            style: dict[str, Any] = {"drawstyle": "steps-post"} if name == "segments" else {}
            for number, run in enumerate(runs):
                if run in shown:
                    _plot(axes, run["lines"], name, run["name"], color=f"C{number}", **style)
            finish(axes, title, "step", legend=8)
        set_log_scale(panels[0], "y")


def _draw_validation(runs: Sequence[Run], path: Path) -> None:
    """Draws all losses, also by source, and the accuracies if there are any."""
    names = list(dict.fromkeys(name for run in runs for line in run["validations"] for name in line))
    losses = [name for name in names if name.startswith("eval_loss") and SEGMENT not in name]
    accuracies = [name for name in names if name.endswith("_accuracy")]
    with picture(path, columns=1 + bool(accuracies), figsize=(10, 3.2), squeeze=False) as axes:
        titles = "validation loss", "right answers in validation"
        for shown, drawn, title in zip(axes[0], (losses, accuracies), titles, strict=False):
            for run, name in product(runs, drawn):
                detail = name.removeprefix("eval_").removeprefix("loss").strip("_")
                label = f"{run['name']}: {detail}" if detail and len(drawn) > 1 else run["name"]
                _plot(shown, run["validations"], name, label, marker="o", markersize=3)
            finish(shown, title, "step", legend=8)


def _segments(lines: Sequence[Line], prefix: str = "") -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line if name.startswith(f"{prefix}{SEGMENT}")))


def _draw_segments(runs: Sequence[Run], path: Path) -> None:
    """Draws a row for each run: losses by segment in training and, if any run has them, in validation."""
    both = (("lines", "", "training"), ("validations", "eval_", "validation"))
    drawn = [one for one in both if any(_segments(run[one[0]], one[1]) for run in runs)]
    size = (5 * len(drawn), 3.2 * len(runs))
    with picture(path, rows=len(runs), columns=len(drawn), figsize=size, squeeze=False) as axes:
        for run, row in zip(runs, axes, strict=True):
            for shown, (lines, prefix, what) in zip(row, drawn, strict=True):
                for name in (names := _segments(run[lines], prefix)):
                    segment = name.removeprefix(f"{prefix}{SEGMENT}")
                    _plot(shown, run[lines], name, f"segment {segment}", marker="o" if prefix else "", markersize=3)
                if names:
                    finish(shown, f"{run['name']}: {what} loss by segment", "step", legend=8)
                else:
                    shown.set_axis_off()


def _draw_speed(runs: Sequence[Run], path: Path) -> None:
    with picture(path, columns=2, figsize=(10, 3.2)) as (left, right):
        for run in runs:
            _plot(left, run["lines"], "tokens_per_second", run["name"])
            for name, what in MEMORY.items():
                style = "--" if name == "reserved_cuda_bytes" else "-"
                _plot(right, run["lines"], name, f"{run['name']}: {what}", lambda value: value / GIB, linestyle=style)
        for axes in (left, right):
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        finish(left, "tokens per second, over all ranks", "step", legend=8)
        finish(right, "memory of the first rank, the most so far [GiB]", "step", legend=8)


def _plot(axes: Any, lines: Sequence[Line], name: str, label: str, scale: Callable = float, **style: Any) -> None:
    """Draws a curve over the steps, from the lines that have a value of this name."""
    points = [(line["step"], scale(line[name])) for line in lines if isinstance(line.get(name), int | float)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **{"linewidth": 1} | style)
