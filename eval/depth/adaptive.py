"""Adaptive compute: is it worth it that an adaptive solver gives each token evaluations of its own?"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from condense.depth.settings import ADAPTIVE_SOLVERS, FIXED_SOLVERS

from ..intervals import FISHER, LOG, interval, shown
from ..results import Table, picture, set_log_scale
from ..results_store import Key, Record
from .experiment import Experiment
from .models import TWIN_STEPS, block_of
from .pretraining import trained
from .readings import held_out_texts
from .solver_tables import scientific
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
        "text against the mean number of evaluations of the field by token (NFE), for adaptive solvers over "
        "tolerances and for fixed steps, which are the same for all tokens. At each tolerance the adaptive solver "
        "is compared with each fixed one that has as many steps as its evaluations pay for, rounded down. The error "
        "is the distance of the end of the flow from the exact one, against the displacement, in float64. Correlations "
        "are Spearman's, between a token's evaluations and its loss, beside the middle 95 % of those where the losses "
        "of each position are shuffled over the texts, so that the position's own share stays. Intervals are 95 % t "
        "intervals over seeds, those of errors on a log scale and those of correlations of Fisher's z, as are their "
        f"means; the text is {NUM_TEXTS} windows."
    )

    def items(self) -> list[Measurement]:
        return [Measurement(model, seed) for seed in self.seeds for model in MODELS]

    def key(self, item: Measurement) -> Key:
        return item._asdict()

    def measure(self, item: Measurement) -> Record:
        model = trained(item.model, item.seed, self.setup, self.output)
        block = block_of(model)
        assert block is not None
        alpha = block.alpha.item()
        tokens = Tokens(model, block, held_out_texts(self.setup, NUM_TEXTS))
        return {
            "alpha": alpha,
            "fixed": [_fixed(tokens, solver, steps) for solver in FIXED_SOLVERS for steps in STEPS[solver]],
            "adaptive": [_adaptive(tokens, solver, at) for solver in TOLERANCES for at in TOLERANCES[solver]],
        }

    def summarise(self, measured: Sequence[tuple[Measurement, Record]]) -> dict[str, Any]:
        records = [item._asdict() | record for item, record in measured]
        return {"records": records, "verdicts": verdicts(records)}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        lines = []
        for record in results["records"]:
            for point in (*record["fixed"], *record["adaptive"]):
                flat = {name: value for name, value in point.items() if not isinstance(value, dict)}
                at_equal = point.get("minus_fixed") or {}
                if point.get("correlation"):
                    low, high = shuffled_middle([point["correlation"]["shuffled"]])
                    flat |= {"correlation": point["correlation"]["correlation"]}
                    flat |= {"shuffled_low": low, "shuffled_high": high}
                flat |= {f"loss_minus_{solver}": at_equal[solver]["loss"] for solver in at_equal}
                lines.append({"model": record["model"], "seed": record["seed"]} | flat)
        return lines

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        return [_verdicts(results), _effort(results), _fixed_steps(results)]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        with picture(path, len(MODELS), 3, figsize=(15, 4.2 * len(MODELS))) as axes:
            for (losses, errors, counts), (model, what) in zip(axes, MODELS.items(), strict=True):
                records = [record for record in results["records"] if record["model"] == model]
                _draw_curves(records, _loss_change, losses)
                _draw_curves(records, lambda record, point: point["error"], errors)
                set_log_scale(errors, "y")
                _draw_counts(records[0], counts)
                losses.set_ylabel(f"loss minus that of {TRAINED_WITH[1]} Euler steps [1/1000 nats]")
                errors.set_ylabel("error / displacement")
                for panel in (losses, errors):
                    panel.set_xscale("log", base=2)
                    panel.set_xlabel("evaluations of the field, mean over tokens")
                for panel in (losses, errors, counts):
                    panel.set_title(f"{model}: {what}", fontsize=9)
                    panel.grid(alpha=0.3)
                    panel.legend(fontsize=7)


def _tolerances(records: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Solvers and tolerances in the order of the records."""
    return [(point["solver"], point["tolerance"]) for point in records[0]["adaptive"]]


def _fixed(tokens: Tokens, solver: str, steps: int) -> dict[str, Any]:
    run = tokens.run(solver, steps)
    nfe = float(run.evaluations_BT.double().mean())
    return {"solver": solver, "steps": steps, "nfe": nfe, "loss": float(run.losses_BT.mean()), "error": run.error}


def _adaptive(tokens: Tokens, solver: str, tolerance: float) -> dict[str, Any]:
    """`minus_fixed`: by fixed solver with as many evaluations, the difference of the loss and the ratio of the error;
    `minus_trained`: the difference of the loss to the solver of the training."""
    run = tokens.run(solver, tolerance)
    loss, taken = float(run.losses_BT.mean()), run.evaluations_BT.numpy()
    against = {}
    for fixed in FIXED_SOLVERS:
        point = _fixed(tokens, fixed, equal_steps(fixed, taken.mean()))
        against[fixed] = {"loss": loss - point["loss"], "error": run.error / point["error"], "nfe": point["nfe"]}
    counts = dict(zip(*(values.tolist() for values in np.unique(taken, return_counts=True)), strict=True))
    return {
        "solver": solver,
        "tolerance": tolerance,
        "nfe": float(taken.mean()),
        "loss": loss,
        "error": run.error,
        "minus_fixed": against,
        "minus_trained": loss - float(tokens.run(*TRAINED_WITH).losses_BT.mean()),
        "counts": {str(number): count for number, count in counts.items()},
        "correlation": rank_correlation(taken, run.losses_BT.numpy()),
    }


def verdicts(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model, adaptive solver and tolerance: the difference of the loss to the best fixed solver of equal NFE.

    The best one has the lowest mean loss over seeds. `worth_it` where the whole interval lies below -`WORTH`; None for
    a single seed.
    """
    found = []
    for model in MODELS:
        for number, (solver, tolerance) in enumerate(_tolerances(records)):
            points = [record["adaptive"][number] for record in records if record["model"] == model]
            differences = {fixed: [point["minus_fixed"][fixed]["loss"] for point in points] for fixed in FIXED_SOLVERS}
            best = max(differences, key=lambda fixed: sum(differences[fixed]))
            mean, low, high = interval(differences[best])
            found.append(
                {
                    "model": model,
                    "solver": solver,
                    "tolerance": tolerance,
                    "best_fixed": best,
                    "loss_difference": mean,
                    "low": low,
                    "high": high,
                    "worth_it": None if high is None else high < -WORTH,
                }
            )
    return found


def _points(results: dict[str, Any], model: str, number: int) -> list[dict[str, Any]]:
    """The point of an adaptive solver and tolerance, by seed."""
    return [record["adaptive"][number] for record in results["records"] if record["model"] == model]


def _verdicts(results: dict[str, Any]) -> Table:
    rows = []
    for place, verdict in enumerate(results["verdicts"]):
        points = _points(results, verdict["model"], place % len(_tolerances(results["records"])))
        best = verdict["best_fixed"]
        difference, error = ([point["minus_fixed"][best][field] for point in points] for field in ("loss", "error"))
        rows.append(
            [
                verdict["model"],
                verdict["solver"],
                f"{verdict['tolerance']:.0e}",
                shown([point["nfe"] for point in points], 1),
                f"{best}, {shown([point['minus_fixed'][best]['nfe'] for point in points], 1)}",
                scientific(difference),
                scientific(error, LOG),
                scientific([point["minus_trained"] for point in points]),
                {True: "yes", False: "no", None: "needs 2 seeds"}[verdict["worth_it"]],
            ]
        )
    columns = [
        "model",
        "adaptive solver",
        "tolerance",
        "NFE",
        "best fixed solver, its NFE",
        "loss minus its loss [nats]",
        "error / its error",
        f"loss minus that of {TRAINED_WITH[1]} Euler steps [nats]",
        "worth it",
    ]
    return Table(
        f"adaptive against fixed steps at equal NFE; worth it: the interval lies below -{WORTH:g} nats", columns, rows
    )


def _effort(results: dict[str, Any]) -> Table:
    rows = []
    for model in MODELS:
        for number, (solver, tolerance) in enumerate(_tolerances(results["records"])):
            points = _points(results, model, number)
            counts: dict[int, int] = {}
            for point in points:
                for nfe, count in point["counts"].items():
                    counts[int(nfe)] = counts.get(int(nfe), 0) + count
            known = [point["correlation"] for point in points if point["correlation"] is not None]
            low, high = shuffled_middle([found["shuffled"] for found in known]) if known else (None, None)
            rows.append(
                [
                    model,
                    solver,
                    f"{tolerance:.0e}",
                    _shares(counts),
                    shown([found["correlation"] for found in known], scale=FISHER),
                    f"{low:.3f} to {high:.3f}" if known else "-",
                    f"{len(known)} of {len(points)}",
                ]
            )
    columns = [
        "model",
        "solver",
        "tolerance",
        "NFE: share of tokens",
        "correlation with loss",
        "shuffled within positions, 95 %",
        "of seeds",
    ]
    return Table("evaluations by token; a seed has no correlation where all tokens take the same", columns, rows)


def _shares(counts: dict[int, int]) -> str:
    """The share of tokens by evaluations, or their range where there are many."""
    if len(counts) > MOST_SHOWN:
        return f"{min(counts)} to {max(counts)}"
    return ", ".join(f"{nfe}: {counts[nfe] / sum(counts.values()):.1%}" for nfe in sorted(counts))


def _fixed_steps(results: dict[str, Any]) -> Table:
    rows = []
    for model in MODELS:
        records = [record for record in results["records"] if record["model"] == model]
        for number, point in enumerate(records[0]["fixed"]):
            losses, errors = ([record["fixed"][number][field] for record in records] for field in ("loss", "error"))
            rows.append(
                [model, point["solver"], point["steps"], f"{point['nfe']:g}", shown(losses, 5), scientific(errors, LOG)]
            )
    columns = ["model", "solver", "steps", "NFE", "held-out loss [nats]", "error / displacement"]
    return Table("fixed steps", columns, rows)


def _loss_change(record: dict[str, Any], point: dict[str, Any]) -> float:
    """Against the solver of the training, in thousandths of a nat."""
    (trained_with,) = (at["loss"] for at in record["fixed"] if (at["solver"], at["steps"]) == TRAINED_WITH)
    return 1000 * (point["loss"] - trained_with)


def _draw_curves(
    records: Sequence[dict[str, Any]], value: Callable[[dict[str, Any], dict[str, Any]], float], panel: Any
) -> None:
    for number, solver in enumerate((*FIXED_SOLVERS, *ADAPTIVE_SOLVERS)):
        kind = "fixed" if solver in FIXED_SOLVERS else "adaptive"
        lines = [
            [(at["nfe"], value(record, at)) for at in record[kind] if at["solver"] == solver] for record in records
        ]
        nfe, values = np.mean(lines, axis=0).T
        style = {
            "color": f"C{number}",
            "ls": "-" if kind == "fixed" else "--",
            "marker": "." if kind == "fixed" else "x",
        }
        panel.plot(nfe, values, label=f"{solver}, {kind}", **style)


def _draw_counts(record: dict[str, Any], panel: Any) -> None:
    """The share of tokens by evaluations, of the first seed; tolerances at which all tokens take the same are left out,
    unless they are all."""
    for point in [point for point in record["adaptive"] if len(point["counts"]) > 1] or record["adaptive"]:
        counts = {int(nfe): count for nfe, count in point["counts"].items()}
        shares = [100 * counts[nfe] / sum(counts.values()) for nfe in sorted(counts)]
        panel.plot(sorted(counts), shares, marker=".", lw=1, label=f"{point['solver']} {point['tolerance']:.0e}")
    panel.set_xscale("log", base=2)
    panel.set_xlabel("evaluations of a token, seed 0")
    panel.set_ylabel("share of tokens [%]")
