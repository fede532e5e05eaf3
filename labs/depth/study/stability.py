"""Does a model with a flow in its middle train as steadily as one with layers, and does the flow matter?

Repeats the paper's table 1 and figure 1, with controls: discrete steps with their own weights (with equal parameters or
equal compute), the two layers left out, and a fixed scale.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from condense.eval.intervals import LOG, format_seeds, interval
from condense.eval.results import Table, picture
from condense.eval.results_store import Record
from condense.eval.tables import select

from .data import described_line
from .experiment import Experiment
from .lines import finish, table
from .models import ARMS, block_of, num_parameters
from .pretraining import CLIPPED_NORM, held_out_loss, log_of, pretrain

LAST_STEPS = 50
SMOOTHED_SHARE = 20  # curves are means over 1/20 of the steps
VANISHING, EXPLODING = 1e-6, 100.0  # norms of the gradient; the paper names no thresholds
FIRST = ("hybrid", "baseline", "shorter", "twin", "wide_twin")  # measured in this order, before the others
COMPARED = tuple(arm for arm in ARMS if arm != "hybrid")
FIGURES = ("loss", "held_out_loss")  # compared by pairs
NORMS = ("gradient_norm", "block_gradient_norm")
PAPER_ROWS = [
    {"model": "paper: baseline", "parameters": "30,503,424", "loss": "6.471", "gradient norm": "0.521 +- 0.140",
     "vanishing steps": "0", "exploding steps": "0"},
    {"model": "paper: hybrid", "parameters": "29,781,249", "of the block": "857,345", "loss": "6.449",
     "gradient norm": "0.509 +- 0.142", "block's": "0.033 +- 0.021", "alpha": "0.1 to 0.065", "vanishing steps": "0",
     "exploding steps": "0"},
]  # fmt: skip


class Run(NamedTuple):
    arm: str
    seed: int


class Stability(Experiment[Run]):
    kind = "depth_stability"
    unit = "model"
    about = (
        "Models trained from random weights on the same batches. baseline: all layers; hybrid: a flow of four Euler "
        "steps in place of two of them; twin: four residual MLP steps with their own weights, together as many as the "
        "flow's; wide_twin: the same with steps as wide as the flow's field; shorter: the two layers left out; "
        "alpha_fixed and alpha_one: a flow whose scale stays at 0.1 and at 1. Gradient norms are measured before "
        f"clipping at {CLIPPED_NORM:g}. A step is vanishing if the norm of all weights or of the block's is below "
        f"{VANISHING:g}, and exploding if the norm of all is above {EXPLODING:g}. Intervals are 95 % t intervals over "
        "seeds, for norms on a log scale."
    )

    def items(self) -> list[Run]:
        arms = [*FIRST, *(arm for arm in ARMS if arm not in FIRST)]
        return [Run(arm, seed) for seed in self.seeds for arm in arms]

    def measure(self, item: Run) -> Record:
        model = pretrain(item.arm, item.seed, self.setup, self.output)
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
        found = super().summarise(measured)
        return {"differences": differences(found["records"])} | found

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        return results["records"]

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        return [_main(results), _comparison(results)]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        """Draws means over seeds, smoothed over neighbouring steps."""
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
                for number, arm in enumerate(ARMS):
                    if (curve := _curve(results, arm, name, smoothed)) is not None:
                        panel.plot(curve, color=f"C{number}", linewidth=1.1, label=arm)
                title = title if name == "alpha" else f"{title} (over {smoothed} steps)"
                finish(panel, "step", "", title, 9, log="y" if name.endswith("norm") else "")


def _curve(results: dict[str, Any], arm: str, name: str, smoothed: int) -> np.ndarray | None:
    """Returns the mean over seeds by step; None if an arm lacks the value, or alpha is fixed."""

    def logged(arm: str, name: str) -> np.ndarray:
        return np.array([record["log"][name] for record in select(results["records"], arm=arm)], dtype=float)

    curves_RS = logged(arm, "loss") - logged("baseline", "loss") if name == "difference" else logged(arm, name)
    if np.isnan(curves_RS).all() or (name == "difference" and arm == "baseline"):
        return None
    if name == "alpha":
        return None if np.ptp(curves_RS) == 0 else curves_RS.mean(0)
    mean_S, window = curves_RS.mean(0), np.ones(smoothed)
    return np.convolve(mean_S, window, "same") / np.convolve(np.ones(len(mean_S)), window, "same")


def figures(log: dict[str, list[Any]]) -> dict[str, Any]:
    """Computes the paper's table 1 from a run's log: means over finite values, None if there are none."""
    steps = pd.DataFrame({name: log[name] for name in ("loss", *NORMS)}, dtype=float)
    losses = steps.loss.tail(LAST_STEPS).dropna().tolist()
    found: dict[str, Any] = {"loss": fmean(losses) if losses else None}
    for name in NORMS:
        norms = steps[name].dropna().tolist()
        found |= {name: fmean(norms), f"{name}_std": pstdev(norms)} if norms else {name: None, f"{name}_std": None}
    return found | {
        "alpha_start": log["alpha"][0],
        "alpha_end": log["alpha"][-1],
        "vanishing_steps": int((steps[[*NORMS]] < VANISHING).any(axis=1).sum()),
        "exploding_steps": int((steps.gradient_norm > EXPLODING).sum()),
        "not_finite_steps": int(steps[["loss", "gradient_norm"]].isna().any(axis=1).sum()),
    }


def differences(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns, by other arm and figure, the hybrid's minus the other's by seed, their mean and its interval.

    A seed without a finite figure for both has None.
    """
    by_seed = pd.DataFrame(records).pivot(index="seed", columns="arm", values=list(FIGURES)).astype(float)
    return {
        other: {name: _difference(by_seed[name]["hybrid"] - by_seed[name][other]) for name in FIGURES}
        for other in COMPARED
    }


def _difference(by_seed: pd.Series) -> dict[str, Any]:
    known = by_seed.dropna()
    mean, low, high = interval([*known]) if len(known) else (None, None, None)
    values = [None if np.isnan(value) else value for value in by_seed]
    return {"values": values, "mean": mean, "low": low, "high": high}


def _main(results: dict[str, Any]) -> Table:
    by_arm = pd.DataFrame(results["records"]).drop(columns="log").groupby("arm")
    last_loss, size, data = _last_loss(results), results["size"], described_line(results)
    rows: list[dict[str, Any]] = [
        {last_loss if name == "loss" else name: cell for name, cell in row.items()} for row in PAPER_ROWS
    ]
    for arm in ARMS:
        own = by_arm.get_group(arm)
        first = own.iloc[0]
        rows.append(
            {
                "model": arm,
                "parameters": f"{first.parameters:,}",
                "of the block": "-" if pd.isna(first.block_parameters) else f"{first.block_parameters:,.0f}",
                last_loss: format_seeds(own.loss.dropna()),
                "held-out loss": format_seeds(own.held_out_loss.dropna()),
                "gradient norm": _norm(own, "gradient_norm"),
                "block's": _norm(own, "block_gradient_norm"),
                "alpha": _alpha(own),
                "vanishing steps": sum(own.vanishing_steps),
                "exploding steps": sum(own.exploding_steps),
                "not finite": sum(own.not_finite_steps),
            }
        )
    return table(f"{size['steps']} steps of {size['batch']} x {size['positions']} tokens, {data}", rows)


def _last_loss(results: dict[str, Any]) -> str:
    return f"loss, last {min(LAST_STEPS, results['size']['steps'])} steps"


def _alpha(lines: pd.DataFrame) -> str:
    known = lines.dropna(subset="alpha_end")
    return f"{known.alpha_start.iloc[0]:.3g} to {format_seeds(known.alpha_end)}" if len(known) else "-"


def _norm(lines: pd.DataFrame, name: str) -> str:
    """Formats the mean over seeds with its interval, and the mean standard deviation over steps."""
    known = lines.dropna(subset=name)
    return f"{format_seeds(known[name], scale=LOG)} +- {fmean(known[f'{name}_std']):,.3f}" if len(known) else "-"


def _comparison(results: dict[str, Any]) -> Table:
    rows = [
        {
            "hybrid minus": other,
            _last_loss(results): format_seeds(found["loss"]["values"], 4),
            "held-out loss": format_seeds(found["held_out_loss"]["values"], 4),
        }
        for other, found in results["differences"].items()
    ]
    return table("hybrid minus the others, paired by seed: below 0 the hybrid is better", rows)
