"""Tests whether a block is a flow: Euler steps against the exact solution, also for networks that are not flows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

from condense.eval.intervals import LOG, format_seeds, interval
from condense.eval.results import Table, picture, set_log_scale
from condense.eval.results_store import Record

from ..model.settings import ADAPTIVE_SOLVERS, FIXED_SOLVERS
from .convergence import ORDERS, converge, linear_problem
from .divergence import diverge
from .experiment import Experiment
from .lines import YES, finish, groups, scientific, table
from .models import TWINS, block_in, build
from .pretraining import pretrain
from .readings import Reading, accurate, held_out_texts, input_of, read_flow, read_layers, read_steps
from .steered import train_steered

PAPER = 0.00068  # the paper's divergence relative to |H(1)|
PASSES = 0.01  # ours: the paper gives no threshold
SUBJECTS = {  # name: what it is, and whether it is a flow
    "hybrid": ("the trained flow", True),
    "random": ("the flow with random weights", True),
    "steered_plus": ("the flow trained to steer, at u = +1", True),
    "steered_minus": ("the flow trained to steer, at u = -1", True),
    "alpha_one": ("a flow trained with alpha = 1", True),
    "hybrid_at_one": ("the trained flow with alpha set to 1 afterwards", True),
    "twin": ("as many different discrete MLP blocks as Euler steps, each a quarter as wide as the field", False),
    "wide_twin": ("the same with blocks as wide as the field", False),
    "layers": ("two layers of the trained baseline", False),
}
KINDS = {True: "a flow", False: "no flow"}
TO_STATE, TO_DISPLACEMENT = "divergence / |H(1)|", "divergence / |H(1) - H(0)|"
CRITERIA = {
    "to_state": f"{TO_STATE}, the paper's",
    "to_displacement": TO_DISPLACEMENT,
    "one_more_step": "divergence with one more Euler step / divergence",
}
PROBLEMS = {"linear": "a linear field, exactly solved", "hybrid": "the trained field, against many steps of rk4"}
SOLVERS = (*FIXED_SOLVERS, *ADAPTIVE_SOLVERS)
CONTROLS = {"steered_plus": 1.0, "steered_minus": -1.0}
NUM_TEXTS = 16
REFERENCE_STEPS, SMALL_REFERENCE_STEPS = 4096, 512  # rk4 steps for the trained field
NUM_TOKENS = 32  # for the order on the trained field


class Measurement(NamedTuple):
    """`part` is divergence (for a subject) or order (for a problem)."""

    part: str
    name: str
    seed: int


class Solvers(Experiment[Measurement]):
    kind = "depth_solvers"
    unit = "measurement"
    about = (
        "The paper tests whether its block is a flow by the divergence of 4 Euler steps from dopri5, relative to the "
        f"norm of the end, and finds {PAPER:.3%}. Here networks that are not flows take the same test: different "
        "residual blocks, read as a field that is constant in tau between them. dopri5 solves such a field piece by "
        f"piece, so it meets every jump. Its tolerance is 1e-9, in float64, over {NUM_TEXTS} texts. A row passes below "
        f"{PASSES:.0%}; the threshold is ours. A criterion separates if every flow of every seed lies below every "
        "other network. Intervals are 95 % t intervals over seeds, for ratios and errors on a log scale."
    )

    @property
    def _reference_steps(self) -> int:
        return SMALL_REFERENCE_STEPS if self.options.small else REFERENCE_STEPS

    def items(self) -> Sequence[Measurement]:
        parts = {"divergence": list(SUBJECTS), "order": list(PROBLEMS)}
        return [Measurement(part, name, seed) for seed in self.seeds for part, names in parts.items() for name in names]

    def measure(self, item: Measurement) -> Record:
        ids_BT = held_out_texts(self.setup, NUM_TEXTS)
        if item.part == "divergence":
            return diverge(*self._subject(item.name, item.seed), ids_BT)
        if item.name == "linear":
            return converge(*linear_problem(item.seed))
        model, first, _, reading = self._subject(item.name, item.seed)
        with torch.no_grad():
            start_1TD = input_of(model, first, ids_BT[:1])[:, -NUM_TOKENS:]
            exact_1TD = reading.fixed(start_1TD, "rk4", self._reference_steps)
        return converge(reading, start_1TD, exact_1TD)

    def _subject(self, name: str, seed: int) -> tuple[nn.Module, nn.Module, nn.Module, Reading]:
        """Returns a float64 model, the first and last module that are read as a flow, and the reading."""
        if name == "random":
            model = build("hybrid", self.size, seed)
        elif name in CONTROLS:
            model = train_steered(seed, self.setup, self.output)
        else:
            arm = {"hybrid_at_one": "hybrid", "layers": "baseline"}.get(name, name)
            model = pretrain(arm, seed, self.setup, self.output)
        model = accurate(model)
        if name == "layers":
            layers = model.transformer.h[slice(*self.size.replaced)]
            return model, layers[0], layers[-1], read_layers(layers, self.size.width)
        block = block_in(model)
        if name == "hybrid_at_one":
            block.alpha.data.fill_(1)
        reading = read_steps(block) if name in TWINS else read_flow(block, CONTROLS.get(name, 0.0))
        return model, block, block, reading

    def summarise(self, measured: Sequence[tuple[Measurement, Record]]) -> dict[str, Any]:
        parts: dict[str, list[dict[str, Any]]] = {"divergence": [], "order": []}
        for item, record in measured:
            parts[item.part].append({"name": item.name, "seed": item.seed, **record})
        return {"reference_steps": self._reference_steps, **parts, "criteria": criteria(parts["divergence"])}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns a line per divergence, and per point of a curve or of an order."""
        divergences = [{"part": "divergence", **record} for record in results["divergence"]]
        points = [
            {"part": "curve", "name": record["name"], "seed": record["seed"], "solver": "euler"}
            | {"evaluations": record["curve"]["steps"], "error": record["curve"]["errors"]}
            for record in results["divergence"]
        ]
        points += [
            {name: found[name] for name in ("part", "name", "seed", "solver", "evaluations")}
            | {"error": found["errors"]}
            for found in ({"part": "order", **found} for found in _orders(results))
        ]
        return divergences + pd.DataFrame(points).explode(["evaluations", "error"]).to_dict("records")

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        divergences, orders = pd.DataFrame(results["divergence"]), pd.DataFrame(_orders(results))
        return [
            _divergence_table(divergences),
            _effect_table(divergences),
            _criteria_table(results["criteria"]),
            _order_table(orders, results["reference_steps"]),
            _adaptive_table(orders),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        _draw_divergence(pd.DataFrame(results["divergence"]), path.with_name(f"{path.name}-divergence"))
        _draw_order(pd.DataFrame(_orders(results)), path.with_name(f"{path.name}-order"))


def criteria(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns whether each criterion separates flows from networks that are not flows, over all seeds.

    `separates`: one threshold puts all flows below it and all others above. `pair_separates`: by twin, whether it lies
    above the trained flow, with a log-scale interval of the ratio over seeds that excludes 1.
    """
    flows, found = [name for name, (_, is_flow) in SUBJECTS.items() if is_flow], []
    for criterion in CRITERIA:
        by_seed = pd.DataFrame(records).pivot(index="seed", columns="name", values=criterion)
        highest, lowest = float(by_seed[flows].max(axis=None)), float(by_seed.drop(columns=flows).min(axis=None))
        lows = {twin: interval(list(by_seed[twin] / by_seed["hybrid"]), LOG)[1] for twin in TWINS}
        pairs = {twin: None if low is None else low > 1 for twin, low in lows.items()}
        bounds = {"highest_flow": highest, "lowest_other": lowest}
        found.append({"criterion": criterion, **bounds, "separates": highest < lowest, "pair_separates": pairs})
    return found


def _orders(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a line per problem, seed and solver, with its errors by number of steps or tolerance."""
    return [
        {"name": record["name"], "seed": record["seed"], "solver": solver} | record[solver]
        for record in results["order"]
        for solver in SOLVERS
    ]


def _percent(values: pd.Series) -> str:
    """Formats the geometric mean of ratios of norms and its interval over seeds."""
    return format_seeds(list(values), scale=LOG, form="%")


def _divergence_table(lines: pd.DataFrame) -> Table:
    rows: list[dict[str, Any]] = [{"model": "paper", "what it is": "a trained flow", TO_STATE: f"{PAPER:.3%}"}]
    for name, own in groups(lines, "name"):
        what, is_flow = SUBJECTS[name]
        passes = interval(list(own.to_state), LOG)[0] < PASSES
        rows.append(
            {
                "model": name,
                "what it is": what,
                TO_STATE: _percent(own.to_state),
                TO_DISPLACEMENT: _percent(own.to_displacement),
                "|H(1) - H(0)| / |H(1)|": _percent(own.displacement),
                "with one more step, / divergence": format_seeds(own.one_more_step, scale=LOG),
                f"the paper's test, at {PASSES:.0%}": f"{'passes' if passes else 'fails'}, and is {KINDS[is_flow]}",
            }
        )
    return table("own Euler steps against dopri5: hidden states", rows)


def _effect_table(lines: pd.DataFrame) -> Table:
    rows = [
        {
            "model": name,
            "divergence of logits": _percent(own.logits),
            "KL [nats]": scientific(own.kl, LOG),
            "loss [nats]": format_seeds(own.loss),
            "loss with dopri5, change [nats]": scientific(own.loss_change),
        }
        for name, own in groups(lines, "name")
    ]
    return table("own Euler steps against dopri5: predictions", rows)


def _criteria_table(found: Sequence[dict[str, Any]]) -> Table:
    rows = [
        {
            "criterion": CRITERIA[criterion["criterion"]],
            "highest of a flow": f"{criterion['highest_flow']:.3g}",
            "lowest of no flow": f"{criterion['lowest_other']:.3g}",
            "separates all": YES[criterion["separates"]],
        }
        | {f"separates hybrid from {twin}": YES[separates] for twin, separates in criterion["pair_separates"].items()}
        for criterion in found
    ]
    return table("does the criterion separate flows from networks that are not flows?", rows)


def _order_table(lines: pd.DataFrame, reference_steps: int) -> Table:
    rows = [
        {"problem": PROBLEMS[name], "solver": solver, "order in theory": ORDERS[solver]}
        | {"measured": format_seeds(own.order.dropna())}
        for (name, solver), own in groups(lines[lines.solver.isin(ORDERS)], "name", "solver")
    ]
    return table(f"order of convergence; of the trained field against {reference_steps:,} steps of rk4", rows)


def _adaptive_table(lines: pd.DataFrame) -> Table:
    adaptive = lines[lines.solver.isin(ADAPTIVE_SOLVERS)].explode(["tolerances", "evaluations", "errors"])
    rows = [
        {"problem": PROBLEMS[name], "solver": solver, "tolerance": f"{tolerance:.0e}"}
        | {"evaluations": format_seeds(own.evaluations, 1), "error / displacement": scientific(own.errors, LOG)}
        for (name, solver, tolerance), own in groups(adaptive, "name", "solver", "tolerances")
    ]
    return table("adaptive solvers", rows)


def _draw_divergence(lines: pd.DataFrame, path: Path) -> None:
    """Draws each model's divergence, relative to state and displacement, and by Euler steps."""
    ratios = {"to_state": f"{TO_STATE} [%]", "to_displacement": f"{TO_DISPLACEMENT} [%]"}
    shares = 100 * lines[list(ratios)]
    least, most = min(100 * PAPER, shares.min(axis=None)), max(100 * PAPER, shares.max(axis=None))
    with picture(path, columns=3, figsize=(15, 4.2)) as (*panels, curves):
        for number, (name, own) in enumerate(groups(lines, "name")):
            _, is_flow = SUBJECTS[name]
            style = {"marker": "o" if is_flow else "X", "color": f"C{number}"}
            for panel, ratio in zip(panels, ratios, strict=True):
                panel.plot(shares[ratio][own.index], own.name, linestyle="", ms=7, alpha=0.7, **style)
            errors = np.mean([curve["errors"] for curve in own.curve], axis=0)
            curves.plot(own.curve.iloc[0]["steps"], errors, ms=4, lw=1, label=f"{name} ({KINDS[is_flow]})", **style)
        panels[0].axvline(100 * PAPER, color="grey", ls="--", lw=1, label=f"the paper: {PAPER:.3%}")
        panels[0].legend(fontsize=8)
        for panel, title in zip(panels, ratios.values(), strict=True):
            set_log_scale(panel, "x")
            panel.set_xlabel(title)
            panel.set_title("circles: flows; crosses: no flows", fontsize=9)
            panel.set_xlim(least / 2, most * 2)
            panel.xaxis.set_minor_formatter("")
            panel.invert_yaxis()
            panel.grid(alpha=0.3)
        curves.set_xscale("log", base=2)
        finish(curves, "Euler steps", "divergence / displacement", "mean over seeds", 9, log="y")


def _draw_order(lines: pd.DataFrame, path: Path) -> None:
    """Draws error against evaluations for every solver, and against tolerance for adaptive ones."""
    with picture(path, len(PROBLEMS), 2, figsize=(11, 8)) as axes:
        for (work, kept), (name, what) in zip(axes, PROBLEMS.items(), strict=True):
            for number, (solver, own) in enumerate(groups(lines[lines.name == name], "solver")):
                evaluations, errors = (np.mean([*own[field]], axis=0) for field in ("evaluations", "errors"))
                label = f"{solver}, order {ORDERS[solver]}" if solver in ORDERS else solver
                style = {"color": f"C{number}", "marker": ".", "ls": "-" if solver in ORDERS else "--", "label": label}
                work.plot(evaluations, errors, **style)
                if solver in ADAPTIVE_SOLVERS:
                    kept.plot(own.tolerances.iloc[0], errors, **style)
            tolerances = lines[lines.solver == "dopri5"].tolerances.iloc[0]
            kept.plot(tolerances, tolerances, color="grey", lw=0.8, label="error = tolerance")
            for panel, x in ((work, "evaluations of the field"), (kept, "tolerance (rtol = atol)")):
                finish(panel, x, "error / displacement", what, 9, log="xy")
