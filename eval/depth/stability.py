"""Does a model with a flow in its middle train as steadily as one with layers, and is it the flow that matters?

The paper's table 1 and figure 1, with controls: discrete steps with weights of their own, of equal parameters and of
equal compute, the two layers simply left out, and a scale that is not learned.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np

from ..intervals import LOG, interval, shown
from ..results import Table, picture, set_log_scale
from ..results_store import Key, Record
from .data import described_line
from .experiment import Experiment
from .models import ARMS, block_of, num_parameters
from .pretraining import CLIPPED_NORM, held_out_loss, log_of, trained

LAST_STEPS = 50
SMOOTHED_SHARE = 20  # curves are means over this part of the steps
VANISHING, EXPLODING = 1e-6, 100.0  # norms of the gradient; the paper names no thresholds
FIRST = ("hybrid", "baseline", "shorter", "twin", "wide_twin")  # measured in this order, and the others after them
COMPARED = ("baseline", "twin", "wide_twin", "shorter", "alpha_fixed", "alpha_one")
PAPER_ROWS = [
    ["paper: baseline", "30,503,424", "-", "6.471", "-", "0.521 +- 0.140", "-", "-", "0", "0", "-"],
    ["paper: hybrid", "29,781,249", "857,345", "6.449", "-", "0.509 +- 0.142", "0.033 +- 0.021", "0.1 to 0.065", "0",
     "0", "-"],
]  # fmt: skip


class Run(NamedTuple):
    arm: str
    seed: int


class Stability(Experiment[Run]):
    kind = "depth_stability"
    unit = "model"
    about = (
        "Models trained from random weights on the same batches. baseline: all layers; hybrid: a flow of four Euler "
        "steps in the place of two of them; twin: four residual MLP steps with weights of their own, together as many "
        "as the flow's, each a quarter as wide; wide_twin: the same with steps as wide as the flow's field; shorter: "
        "the two layers left out; alpha_fixed and alpha_one: a flow whose scale stays at 0.1 and at 1. "
        f"Norms of the gradient are those before clipping at {CLIPPED_NORM:g}; a step is vanishing where the "
        f"norm of all weights or of the block's is below {VANISHING:g}, exploding where that of all is above "
        f"{EXPLODING:g}. "
        "Intervals are 95 % t intervals over seeds, those of norms on a log scale."
    )

    def items(self) -> list[Run]:
        arms = [*FIRST, *(arm for arm in ARMS if arm not in FIRST)]
        return [Run(arm, seed) for seed in self.seeds for arm in arms]

    def key(self, item: Run) -> Key:
        return item._asdict()

    def measure(self, item: Run) -> Record:
        model = trained(item.arm, item.seed, self.setup, self.output)
        block = block_of(model)
        log = log_of(item.arm, item.seed, self.setup, self.output)
        return {
            "parameters": num_parameters(model),
            "block_parameters": None if block is None else num_parameters(block),
            "held_out_loss": held_out_loss(model, self.setup),
            **figures(log),
            "log": log,
        }

    def summarise(self, measured: Sequence[tuple[Run, Record]]) -> dict[str, Any]:
        records = [item._asdict() | record for item, record in measured]
        return {"differences": differences(records), "records": records}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        return results["records"]

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        corpus, size = results["corpus"], results["size"]
        data = described_line(corpus, size["vocab_size"])
        return [
            Table(f"{size['steps']} steps of {size['batch']} x {size['positions']} tokens, {data}", *_main(results)),
            Table("hybrid minus the others, paired by seed: below 0 the hybrid is better", *_compared(results)),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        """Means over seeds, smoothed over the steps around each."""
        panels = {
            "loss": "training loss",
            "difference": "loss minus the baseline's",
            "gradient_norm": "norm of the gradient",
            "block_gradient_norm": "norm of the block's gradient",
            "alpha": "alpha, where it is learned",
        }
        smoothed = max(1, results["size"]["steps"] // SMOOTHED_SHARE)
        with picture(path, columns=len(panels), figsize=(19, 3.6)) as axes:
            for panel, (name, title) in zip(axes, panels.items(), strict=True):
                for arm in ARMS:
                    if (curve := _curve(results, arm, name, smoothed)) is not None:
                        panel.plot(curve, color=f"C{ARMS.index(arm)}", linewidth=1.1, label=arm)
                panel.set_title(f"{title} (over {smoothed} steps)" if name != "alpha" else title, fontsize=9)
                panel.set_xlabel("step")
                panel.grid(alpha=0.3)
                panel.legend(fontsize=7)
            for panel in axes[2:4]:
                set_log_scale(panel, "y")


def _curve(results: dict[str, Any], arm: str, name: str, smoothed: int) -> np.ndarray | None:
    """By step, the mean over seeds; None for an arm without one, and for an alpha that stays as it is."""
    records = _of(results, arm)
    curves_RS = np.array([record["log"]["loss" if name == "difference" else name] for record in records], dtype=float)
    if name == "difference":
        curves_RS -= np.array([record["log"]["loss"] for record in _of(results, "baseline")], dtype=float)
    if np.isnan(curves_RS).all() or (name == "difference" and arm == "baseline"):
        return None
    if name == "alpha":
        return None if np.ptp(curves_RS) == 0 else curves_RS.mean(0)
    mean_S, window = curves_RS.mean(0), np.ones(smoothed)
    return np.convolve(mean_S, window, "same") / np.convolve(np.ones(len(mean_S)), window, "same")


def figures(log: dict[str, list[Any]]) -> dict[str, Any]:
    """The figures of the paper's table 1, of the log of a run; means over finite values, None where there is none."""
    losses = _finite(log["loss"][-LAST_STEPS:])
    found: dict[str, Any] = {"loss": fmean(losses) if losses else None}
    for name in ("gradient_norm", "block_gradient_norm"):
        norms = _finite(log[name])
        found |= {name: fmean(norms), f"{name}_std": pstdev(norms)} if norms else {name: None, f"{name}_std": None}
    steps = list(zip(log["gradient_norm"], log["block_gradient_norm"], strict=True))
    return found | {
        "alpha_start": log["alpha"][0],
        "alpha_end": log["alpha"][-1],
        "vanishing_steps": sum(any(norm < VANISHING for norm in _finite(step)) for step in steps),
        "exploding_steps": sum(norm > EXPLODING for norm in _finite(log["gradient_norm"])),
        "not_finite_steps": sum(None in step for step in zip(log["loss"], log["gradient_norm"], strict=True)),
    }


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def differences(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By other arm and figure: the hybrid's minus the other's by seed, their mean and its interval.

    A seed without a finite figure of both has None.
    """
    by_run = {(record["arm"], record["seed"]): record for record in records}
    seeds = sorted({record["seed"] for record in records})
    found: dict[str, Any] = {}
    for other in COMPARED:
        found[other] = {}
        for figure in ("loss", "held_out_loss"):
            pairs = [(by_run["hybrid", seed][figure], by_run[other, seed][figure]) for seed in seeds]
            values = [None if None in pair else pair[0] - pair[1] for pair in pairs]
            known = _finite(values)
            mean, low, high = interval(known) if known else (None, None, None)
            found[other][figure] = {"values": values, "mean": mean, "low": low, "high": high}
    return found


def _of(results: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [record for record in results["records"] if record["arm"] == arm]


def _main(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = [
        "model",
        "parameters",
        "of the block",
        _last_loss(results),
        "held-out loss",
        "gradient norm",
        "block's",
        "alpha",
        "vanishing steps",
        "exploding steps",
        "not finite",
    ]
    rows: list[list[Any]] = []
    for arm in ARMS:
        records = _of(results, arm)
        values = {name: [record[name] for record in records] for name in records[0] if name not in ("log", "arm")}
        parameters, block = records[0]["parameters"], records[0]["block_parameters"]
        has_alpha = records[0]["alpha_end"] is not None
        rows.append(
            [
                arm,
                f"{parameters:,}",
                "-" if block is None else f"{block:,}",
                shown(values["loss"]),
                shown(values["held_out_loss"]),
                _norm(values, "gradient_norm"),
                _norm(values, "block_gradient_norm"),
                f"{values['alpha_start'][0]:.3g} to {shown(values['alpha_end'])}" if has_alpha else "-",
                *(sum(values[f"{name}_steps"]) for name in ("vanishing", "exploding", "not_finite")),
            ]
        )
    return columns, PAPER_ROWS + rows


def _last_loss(results: dict[str, Any]) -> str:
    return f"loss, last {min(LAST_STEPS, results['size']['steps'])} steps"


def _norm(values: dict[str, list[Any]], name: str) -> str:
    """The mean over seeds with its interval, and the mean standard deviation over steps."""
    deviations = _finite(values[f"{name}_std"])
    return f"{shown(values[name], scale=LOG)} +- {fmean(deviations):,.3f}" if deviations else "-"


def _compared(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [other, shown(found["loss"]["values"], 4), shown(found["held_out_loss"]["values"], 4)]
        for other, found in results["differences"].items()
    ]
    return ["hybrid minus", _last_loss(results), "held-out loss"], rows
