"""Measures whether adaptive compute is worth it: a number of evaluations for each token."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from condense.eval.intervals import FISHER, LOG, format_seeds, interval
from condense.eval.results import Table, picture
from condense.eval.results_store import Record

from ..model.settings import ADAPTIVE_SOLVERS, FIXED_SOLVERS
from .experiment import Experiment
from .lines import YES, finish, groups, scientific, table
from .models import TWIN_STEPS
from .pretraining import pretrain
from .readings import held_out_texts
from .tokens import Tokens, equal_steps, rank_correlation, shuffled_middle

MODELS = {"hybrid": "the trained flow", "alpha_one": "a flow trained with alpha = 1"}
STEPS = {"euler": (1, 2, 3, 4, 6, 8, 12, 16, 24), "midpoint": (1, 2, 3, 4, 6, 8, 12), "rk4": (1, 2, 3, 4, 6)}
TOLERANCES = {"dopri5": (1e-1, 1e-2, 1e-3, 1e-4, 1e-5), "adaptive_heun": (1e-1, 1e-2, 1e-3, 1e-4)}
TRAINED_WITH = ("euler", TWIN_STEPS)
NUM_TEXTS = 16
MOST_SHOWN = 5  # shares in a cell
WORTH = 1e-3  # nats; ours


class Measurement(NamedTuple):
    model: str
    seed: int


class Adaptive(Experiment[Measurement]):
    kind = "depth_adaptive"
    unit = "model"
    about = (
        "An adaptive solver chooses the steps of each token by its own error. Is it worth it? The loss on held-out "
        "text is compared with the mean number of evaluations of the field by token (NFE). At each tolerance the "
        "adaptive solver is compared with each fixed one of as many steps as its evaluations pay for, rounded down. "
        "The error is the distance from the exact end of the flow, relative to the displacement, in float64. "
        "Correlations are Spearman's, between a token's evaluations and its loss. Beside them is the middle 95 % of "
        "correlations with the losses of each position shuffled over the texts, which keeps the position's effect. "
        "Intervals are 95 % t intervals over seeds, for errors on a log scale and for correlations on the scale of "
        f"Fisher's z. The text is {NUM_TEXTS} windows."
    )

    def items(self) -> list[Measurement]:
        return [Measurement(model, seed) for seed in self.seeds for model in MODELS]

    def measure(self, item: Measurement) -> Record:
        model = pretrain(item.model, item.seed, self.setup, self.output)
        tokens = Tokens(model, held_out_texts(self.setup, NUM_TEXTS))
        return {
            "alpha": tokens.block.alpha.item(),
            "fixed": [_run_fixed(tokens, solver, steps) for solver in FIXED_SOLVERS for steps in STEPS[solver]],
            "adaptive": [_adaptive(tokens, solver, at) for solver in TOLERANCES for at in TOLERANCES[solver]],
        }

    def summarise(self, measured: Sequence[tuple[Measurement, Record]]) -> dict[str, Any]:
        found = super().summarise(measured)
        return found | {"verdicts": verdicts(found["records"])}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        lines = points(results["records"])
        for line in lines:
            if found := line.get("correlation"):
                low, high = shuffled_middle([found["shuffled"]])
                line |= {"correlation": found["correlation"], "shuffled_low": low, "shuffled_high": high}
            line |= {f"loss_minus_{solver}": found["loss"] for solver, found in line.get("minus_fixed", {}).items()}
        return lines

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        lines = pd.DataFrame(points(results["records"]))
        return [_verdicts(lines, results["verdicts"]), _effort(lines), _fixed_steps(lines)]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        lines = pd.DataFrame(points(results["records"]))
        with picture(path, len(MODELS), 3, figsize=(15, 4.2 * len(MODELS))) as axes:
            for panels, (model, what) in zip(axes, MODELS.items(), strict=True):
                own = lines[lines.model == model]
                losses, errors, counts = panels
                trained_with = own[(own.solver == TRAINED_WITH[0]) & (own.steps == TRAINED_WITH[1])]
                changes = 1000 * (own.loss - own.seed.map(trained_with.set_index("seed").loss))
                _draw_curves(own.assign(change=changes), "change", losses)
                _draw_curves(own, "error", errors)
                _draw_counts(own[own.seed == own.seed.iloc[0]], counts)
                for panel in panels:
                    panel.set_xscale("log", base=2)
                evaluations, title = "evaluations of the field, mean over tokens", f"{model}: {what}"
                finish(losses, evaluations, f"loss minus that of {TRAINED_WITH[1]} Euler steps [1/1000 nats]", title, 9)
                finish(errors, evaluations, "error / displacement", title, 9, log="y")
                finish(counts, "evaluations of a token, seed 0", "share of tokens [%]", title, 9)


def points(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a line per model, seed, solver and steps or tolerance."""
    return [
        {"model": record["model"], "seed": record["seed"]} | point
        for record in records
        for point in (*record["fixed"], *record["adaptive"])
    ]


def _run_fixed(tokens: Tokens, solver: str, steps: int) -> dict[str, Any]:
    run = tokens.run(solver, steps)
    nfe = float(run.evaluations_BT.double().mean())
    return {"solver": solver, "steps": steps, "nfe": nfe, "loss": float(run.losses_BT.mean()), "error": run.error}


def _adaptive(tokens: Tokens, solver: str, tolerance: float) -> dict[str, Any]:
    """Returns the figures of an adaptive solver at a tolerance.

    `minus_fixed` has the difference of losses and the ratio of errors to each fixed solver with as many evaluations,
    and `minus_trained` the difference of losses to the solver used in training.
    """
    run = tokens.run(solver, tolerance)
    loss, taken = float(run.losses_BT.mean()), run.evaluations_BT.numpy()
    against = {}
    for fixed in FIXED_SOLVERS:
        point = _run_fixed(tokens, fixed, equal_steps(fixed, taken.mean()))
        against[fixed] = {"loss": loss - point["loss"], "error": run.error / point["error"], "nfe": point["nfe"]}
    numbers, counts = np.unique(taken, return_counts=True)
    return {
        "solver": solver,
        "tolerance": tolerance,
        "nfe": float(taken.mean()),
        "loss": loss,
        "error": run.error,
        "minus_fixed": against,
        "minus_trained": loss - float(tokens.run(*TRAINED_WITH).losses_BT.mean()),
        "counts": dict(zip(map(str, numbers), counts.tolist(), strict=True)),
        "correlation": rank_correlation(taken, run.losses_BT.numpy()),
    }


def verdicts(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares losses with the best fixed solver of equal NFE, by model, adaptive solver and tolerance.

    The best solver has the lowest mean loss over seeds. `worth_it`: the whole interval lies below -`WORTH`; None for a
    single seed.
    """
    found = []
    for kind, own in _adaptive_points(pd.DataFrame(points(records))):
        differences = {fixed: [against[fixed]["loss"] for against in own.minus_fixed] for fixed in FIXED_SOLVERS}
        best = max(differences, key=lambda fixed: sum(differences[fixed]))
        mean, low, high = interval(differences[best])
        of_seeds = {"best_fixed": best, "loss_difference": mean, "low": low, "high": high}
        found.append(kind | of_seeds | {"worth_it": None if high is None else high < -WORTH})
    return found


def _adaptive_points(lines: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yields the points of all seeds by model, adaptive solver and tolerance."""
    names = ["model", "solver", "tolerance"]
    adaptive = lines[lines.solver.isin(ADAPTIVE_SOLVERS)]
    return ((dict(zip(names, values, strict=True)), own) for values, own in groups(adaptive, *names))


def _verdicts(lines: pd.DataFrame, found: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for verdict, (kind, own) in zip(found, _adaptive_points(lines), strict=True):
        best = verdict["best_fixed"]
        against = pd.DataFrame([found[best] for found in own.minus_fixed])
        rows.append(
            {
                "model": kind["model"],
                "adaptive solver": kind["solver"],
                "tolerance": f"{kind['tolerance']:.0e}",
                "NFE": format_seeds(own.nfe, 1),
                "best fixed solver, its NFE": f"{best}, {format_seeds(against.nfe, 1)}",
                "loss minus its loss [nats]": scientific(against.loss),
                "error / its error": scientific(against.error, LOG),
                f"loss minus that of {TRAINED_WITH[1]} Euler steps [nats]": scientific(own.minus_trained),
                "worth it": YES[verdict["worth_it"]],
            }
        )
    title = f"adaptive against fixed steps at equal NFE; worth it: the interval lies below -{WORTH:g} nats"
    return table(title, rows)


def _effort(lines: pd.DataFrame) -> Table:
    rows = []
    for kind, own in _adaptive_points(lines):
        known = pd.DataFrame([found for found in own.correlation if found], columns=["correlation", "shuffled"])
        middle = "{:.3f} to {:.3f}".format(*shuffled_middle([*known.shuffled])) if len(known) else "-"
        rows.append(
            kind
            | {
                "tolerance": f"{kind['tolerance']:.0e}",
                "NFE: share of tokens": _shares(_counts(own)),
                "correlation with loss": format_seeds(known.correlation, scale=FISHER),
                "shuffled within positions, 95 %": middle,
                "of seeds": f"{len(known)} of {len(own)}",
            }
        )
    return table("evaluations by token; a seed has no correlation where all tokens take the same", rows)


def _counts(lines: pd.DataFrame) -> pd.Series:
    """Counts tokens by their evaluations."""
    return pd.DataFrame([*lines.counts]).sum().rename(int).sort_index()


def _shares(counts: pd.Series) -> str:
    """Returns the share of tokens by evaluations, or their range if there are many."""
    if len(counts) > MOST_SHOWN:
        return f"{counts.index[0]} to {counts.index[-1]}"
    return ", ".join(f"{nfe}: {share:.1%}" for nfe, share in (counts / counts.sum()).items())


def _fixed_steps(lines: pd.DataFrame) -> Table:
    rows = [
        {"model": model, "solver": solver, "steps": int(steps), "NFE": f"{own.nfe.iloc[0]:g}"}
        | {"held-out loss [nats]": format_seeds(own.loss, 5), "error / displacement": scientific(own.error, LOG)}
        for (model, solver, steps), own in groups(lines[lines.solver.isin(FIXED_SOLVERS)], "model", "solver", "steps")
    ]
    return table("fixed steps", rows)


def _draw_curves(lines: pd.DataFrame, figure: str, panel: Any) -> None:
    """Draws a figure against the evaluations, means over seeds."""
    for number, (solver, own) in enumerate(groups(lines, "solver")):
        means = own.groupby(own.groupby("seed").cumcount())[["nfe", figure]].mean()
        kind, line, marker = ("fixed", "-", ".") if solver in FIXED_SOLVERS else ("adaptive", "--", "x")
        panel.plot(means.nfe, means[figure], ls=line, marker=marker, color=f"C{number}", label=f"{solver}, {kind}")


def _draw_counts(lines: pd.DataFrame, panel: Any) -> None:
    """Draws the share of tokens by evaluations; skips tolerances with equal counts unless no others exist."""
    counts = {f"{kind['solver']} {kind['tolerance']:.0e}": _counts(own) for kind, own in _adaptive_points(lines)}
    several = {label: found for label, found in counts.items() if len(found) > 1}
    for label, found in (several or counts).items():
        panel.plot(found.index, 100 * found / found.sum(), marker=".", lw=1, label=label)
