"""Pictures of the probes: probabilities against the factor, as in the papers."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from condense.eval.results import picture, set_log_scale

from .aggregation import SET, answers, percent
from .classes import DIGITS, SHOWN_FROM

# Colours and line styles that are the same in every panel.
LOOKS = {digit: (f"C{digit}", "-") for digit in DIGITS} | {"yes": ("C0", "-"), "no": ("C1", "-")}
LOOKS |= {"other tokens": ("grey", ":"), "other digits": ("silver", ":")}
MOST_PANELS = 4  # in a row
COLUMNS_BELOW = 3
MOST_DRAWN = 12  # prompts of a group with a panel each; more are drawn as their mean


def draw(results: dict[str, Any], varied_in: Callable[[str], str], path: Path) -> None:
    """Draws a picture for each group of items, with a panel for each item and model; a data set's panels show means.

    `varied_in` returns the label of the factor's axis for a group.
    """
    every = [(model["name"], record) for model in results["models"] for record in model["records"]]
    for group in dict.fromkeys(record["group"] for _, record in every):
        panels = [(name, record) for name, record in every if _belongs(record, group)]
        if not panels:
            continue
        varied = varied_in(group)
        here = path.with_name(f"{path.name}-{''.join(c if c.isalnum() else '_' for c in group)}")
        if "recall" in panels[0][1]:
            _draw_dial(results, group, here)
        elif "distance" in panels[0][1]["curves"]:
            _draw_errors(panels, varied, here)
        elif group == SET or len(panels) > MOST_DRAWN * len({model for model, _ in panels}):
            _draw_set(results, group, varied, here)
        else:
            _draw_curves(panels, varied, here, many=len(results["models"]) > 1)


def _belongs(record: dict[str, Any], group: str) -> bool:
    return record["group"] == group and record["valid"]


def _draw_curves(panels: list[tuple[str, dict[str, Any]]], varied: str, path: Path, many: bool) -> None:
    columns = min(MOST_PANELS, len(panels))
    rows = -(-len(panels) // columns)
    longest = max(len(shown_curves(record)) for _, record in panels)
    height = 2.9 + 0.13 * -(-longest // COLUMNS_BELOW)  # legends stand below, where they cover no curve
    with picture(path, rows, columns, figsize=(3.6 * columns, height * rows), squeeze=False) as axes:
        for panel, (model, record) in zip(axes.flat, panels, strict=False):
            panel.set_title(f"{record['name']} ({model})" if many else record["name"], fontsize=7, wrap=True)
            shown = shown_curves(record)
            if said := _nothing_said(record, shown):
                panel.text(0.03, 0.94, said, transform=panel.transAxes, fontsize=8)
            for (name, curve), look in zip(shown.items(), _looks(list(shown)), strict=True):
                panel.plot(record["factors"], curve, label=_label(name), linewidth=1.3, **look)
            panel.set_ylim(-0.02, 1.02)
            panel.set_xlabel(varied, fontsize=7)
            panel.set_ylabel("probability", fontsize=7)
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.3)
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": COLUMNS_BELOW}
            panel.legend(fontsize=6, columnspacing=1, **place)
        for panel in list(axes.flat)[len(panels) :]:
            panel.axis("off")


def _looks(names: list[str]) -> list[dict[str, str]]:
    """Returns the colour and style of each curve of a panel. A named token differs from an answer in one of them."""
    taken = [LOOKS.get(name) for name in names]
    looks = [(f"C{number}", style) for style in ("-", "--", "-.") for number in range(10)]
    free = cycle(look for look in looks if look not in taken)
    return [dict(zip(("color", "linestyle"), LOOKS.get(name) or next(free), strict=True)) for name in names]


def _nothing_said(record: dict[str, Any], shown: dict[str, np.ndarray]) -> str | None:
    """Explains why no answer's curve is drawn; None if one is."""
    if all(name.startswith("other ") for name in shown):
        return "nothing reached 5 %"
    return "no answer reached 5 %" if record["curves"] and not set(shown) & set(record["curves"]) else None


def _label(name: str) -> str:
    return f"{name}, each < 5 %" if name.startswith("other ") else name


def _draw_errors(panels: list[tuple[str, dict[str, Any]]], varied: str, path: Path) -> None:
    with picture(path, figsize=(4.6, 3.2)) as axes:
        for model, record in panels:
            label = f"{record['name']} ({model})"
            axes.plot(record["factors"], record["curves"]["distance"], marker="o", ms=3, label=label)
        axes.set_xscale("log", base=2)
        set_log_scale(axes, "y")
        axes.set(xlabel=varied, ylabel="total variation to the densest")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)


def shown_curves(record: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the classes and other tokens that reach 5 % somewhere; the remaining digits are one curve, and all other
    tokens one."""
    nothing = np.zeros(len(record["factors"]))
    curves = {name: np.asarray(curve) for name, curve in record["curves"].items()}
    shown = {name: curve for name, curve in curves.items() if curve.max() >= SHOWN_FROM}
    rest = sum(curves.values(), start=nothing) - sum(shown.values(), start=nothing)
    shown |= {f"“{name}”" if curves else name: np.asarray(record["likely"][name]) for name in record["unwatched"]}
    if set(curves) == set(DIGITS):
        shown["other digits"] = rest
    shown["other tokens"] = 1 - sum(shown.values(), start=nothing)
    return shown


def _draw_set(results: dict[str, Any], group: str, varied: str, path: Path) -> None:
    """Draws a data set, a panel for each model.

    Counts: the mean of the likeliest digit over items with equally many repetitions. Sums: the mean probability of
    labels. Objects: a histogram of m_max.
    """
    models = [model for model in results["models"] if any(_belongs(record, group) for record in model["records"])]
    with picture(path, 1, len(models), figsize=(4.2 * len(models), 3.2), squeeze=False) as axes:
        for panel, model in zip(axes[0], models, strict=True):
            records = [record for record in model["records"] if _belongs(record, group)]
            summary = model["summary"]
            silent = "" if answers(summary) else f"\nno answer: their mass is {percent(summary['mass'])}"
            panel.set_title(model["name"] + silent, fontsize=9)
            if "m_max_of_each" in summary:
                panel.hist(summary["m_max_of_each"], bins=np.linspace(0, 1, 41).tolist())
                panel.set(xlabel="m_max", ylabel="records", yscale="symlog")
                continue
            has_counts = "repetitions" in records[0]
            if has_counts:
                for number in sorted({record["repetitions"] for record in records}):
                    mine = [record for record in records if record["repetitions"] == number]
                    panel.plot(*_mean(mine, [_answers(record["curves"]) for record in mine]), label=f"{number} times")
            else:
                for name, color in (("original", "tab:blue"), ("shrunk", "tab:red")):
                    together = [np.sum([r["curves"][label] for label in set(r[name])], axis=0) for r in records]
                    panel.plot(*_mean(records, together), label=f"{name} labels", color=color)
            panel.set(xlabel=varied, ylabel="likeliest digit, mean" if has_counts else "probability, mean")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)


def _mean(records: list[dict[str, Any]], curves: list[np.ndarray]) -> tuple[list[float], list[float]]:
    """Returns the factors, and the mean at each over the records that have it."""
    values: dict[float, list[float]] = {}
    for record, curve in zip(records, curves, strict=True):
        for factor, value in zip(record["factors"], curve.tolist(), strict=True):
            values.setdefault(factor, []).append(value)
    factors = sorted(values)
    return factors, [sum(values[factor]) / len(values[factor]) for factor in factors]


def _answers(curves: dict[str, list[float]]) -> np.ndarray:
    """Returns the likeliest digit at each factor."""
    return np.asarray([curves[digit] for digit in DIGITS]).argmax(axis=0)


def _draw_dial(results: dict[str, Any], group: str, path: Path) -> None:
    with picture(path, figsize=(4.6, 3.2)) as axes:
        for model in results["models"]:
            found = model["summary"]["dials"].get(group)
            if found:
                axes.plot(found["factors"], found["recall"], label=f"{model['name']}, {found['valid']} prompts")
        axes.axvline(1, color="grey", lw=0.8)
        set_log_scale(axes, "x")
        axes.set(ylim=(-0.02, 1.02), xlabel="duration of every key in memory", ylabel="probability of the right answer")
        axes.set_title(group, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
