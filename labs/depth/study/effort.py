"""How many evaluations of the field an adaptive solver needs at each control, and what that means.

The paper's section 5.3 and figures 3 and 4, with additions: steps per token instead of per batch, a block trained with
swapped labels, and probes with a held-out split and shuffled labels. Everything is solved in float64: at tight
tolerances the error estimate in float32 is only rounding.

Axes: T tokens, n tokens of all prompts, D hidden size, N examples.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch

from condense.eval.intervals import LOG, LOGIT, format_seeds
from condense.eval.results import Table, picture
from condense.eval.results_store import Record

from .data import described_line
from .evaluations import (
    BOUNDARY,
    READINGS,
    Evaluations,
    fit_effort,
    measure_probes,
    neighbours,
    num_steps_of,
    prior_share,
    states_before,
)
from .experiment import Experiment
from .lexicon import PAPER_PROMPT
from .lines import draw_band, finish, groups, table
from .pretraining import pretrain
from .steered import TRAINED_ON, Labels, Prompts, lexicon_of, num_steps, parts_of, train_steered
from .steering import DOTS, FEW_CONTROLS
from .words import encode_prompt

SOLVERS = ("dopri5", "adaptive_heun")
CONTROLS = np.linspace(-2, 2, 9).tolist()
TOLERANCES, FEW_TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6), (1e-3, 1e-4)  # relative; the absolute tolerance is a tenth
TOLERANCES_OF_NEIGHBOURS = (1e-3, 1e-4)  # adaptive_heun needs thousands of steps at smaller ones
PAPER_STEPS = (2, 4)  # 14 and 26 evaluations: at the loosest tolerance and at a 1000 times tighter one
PAPER_SCALING = [
    {"trained on": "the paper", "tolerance": "loosest", "solved": "common", "NFE: dopri5": "14",
     "steps: dopri5": str(PAPER_STEPS[0]), "steps: heun / dopri5": "0.85 to 1.15"},
    {"trained on": "the paper", "tolerance": "1000 times tighter", "solved": "common", "NFE: dopri5": "26",
     "steps: dopri5": str(PAPER_STEPS[1])},
]  # fmt: skip
BLOCKS = tuple(product(get_args(Prompts), get_args(Labels)))


class Run(NamedTuple):
    """`what` is the solver, or probes."""

    seed: int
    prompts: Prompts
    labels: Labels
    what: str


class Effort(Experiment[Run]):
    kind = "depth_effort"
    unit = "run"
    about = (
        "NFE: evaluations of the field until tau = 1, solved in float64. common: one step size for all tokens, as in "
        "torchdiffeq and in the paper; by token: each token has its own steps (torchode). The absolute tolerance is a "
        "tenth of the relative one. Two evaluations choose the first step. A step of dopri5 takes 6; one of "
        "adaptive_heun takes 1 in torchdiffeq and 2 in torchode, so compare its steps, not its NFE. own: trained as in "
        "the experiment steering; swapped: with the negative word at u = +1. NFE is fitted by level + slope u + "
        "curvature |u|. A slope with the same sign for both labels is a property of the block; one that changes sign "
        "belongs to the words. Probes are logistic regressions on the last token's state at tau: of the sentiment of a "
        "text (prompt and word, u = 0), and of the sign of u (prompt at u = -1 and +1). They are tested on prompts of "
        "subjects that were not trained. Shuffled labels are shuffled by word, or by prompt and u: a probe that finds "
        "them doesn't find sentiment. Intervals are 95 % t intervals over seeds."
    )

    @property
    def controls(self) -> list[float]:
        return FEW_CONTROLS if self.options.small else CONTROLS

    @property
    def tolerances(self) -> tuple[float, ...]:
        return FEW_TOLERANCES if self.options.small else TOLERANCES

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "steps_of_steering": num_steps(self.setup),
            "controls": self.controls,
            "tolerances": list(self.tolerances),
            "tolerances_of_neighbours": list(TOLERANCES_OF_NEIGHBOURS),
            "lexicon": lexicon_of(self.setup).fingerprint(),
        }

    def items(self) -> list[Run]:
        return [Run(seed, *block, what) for seed in self.seeds for block in BLOCKS for what in (*SOLVERS, "probes")]

    def measure(self, item: Run) -> Record:
        model = train_steered(item.seed, self.setup, self.output, item.labels, item.prompts)
        if item.what == "probes":
            return measure_probes(model, self.setup, item.seed)
        tokenizer = self.setup.corpus.tokenizer
        tested = parts_of("many", item.seed, self.setup).test_prompts
        starts = states_before(model, [encode_prompt(tokenizer, prompt) for prompt in (PAPER_PROMPT, *tested)])
        effort = Evaluations(model, item.what)
        return {
            "sweep": [self._sweep(effort, starts, tolerance) for tolerance in self.tolerances],
            "neighbours": [neighbours(effort, starts, tolerance) for tolerance in TOLERANCES_OF_NEIGHBOURS],
            "prior": prior_share(pretrain("hybrid", item.seed, self.setup, self.output), self.setup),
        }

    def _sweep(self, effort: Evaluations, starts: Sequence[torch.Tensor], tolerance: float) -> dict[str, Any]:
        """Returns NFE by control: `common`, `last` and `mean` of the paper's prompt, `others` of all other prompts.

        `last` is the last token's, `mean` the mean over tokens, and `others` the mean over last tokens.
        """
        paper_nD, others_nD = starts[0], torch.cat([start[-1:] for start in starts[1:]])
        common = [effort.common(paper_nD, u, tolerance) for u in self.controls]
        paper, others = (
            [effort.by_token(tokens_nD, u, tolerance) for u in self.controls] for tokens_nD in (paper_nD, others_nD)
        )
        last, mean = [counts[-1] for counts in paper], list(map(fmean, paper))
        return {"common": common, "last": last, "mean": mean, "others": list(map(fmean, others))}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        return _lines(results)

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        lines = pd.DataFrame(_lines(results))
        sweeps, probes = lines[lines.what != "probes"], lines[lines.what == "probes"]
        data = described_line(results)
        return [
            _regimes(sweeps, f'NFE below and above u = {BOUNDARY} on "{PAPER_PROMPT}": {data}'),
            _causes(sweeps, results["records"]),
            _scaling(sweeps),
            _neighbours(results["records"]),
            _probes(probes),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        lines = pd.DataFrame(_lines(results))
        dopri5, own = lines[lines.what == "dopri5"], lines[lines.labels == "own"]
        with picture(path, 2, 2, figsize=(11, 7.6)) as axes:
            _draw_sweep(dopri5[(dopri5.prompts == "paper") & (dopri5.labels == "own")], axes[0, 0])
            _draw_labels(dopri5[dopri5.tolerance == results["tolerances"][-1]], axes[0, 1])
            _draw_scaling(own[(own.prompts == "paper") & (own.what != "probes")], axes[1, 0])
            _draw_probes(own[(own.prompts == "many") & (own.what == "probes")], axes[1, 1])


def _lines(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a line per block, solver, tolerance and control, and per block, tau and reading."""
    found = []
    for record in results["records"]:
        run = {name: record[name] for name in Run._fields}
        if record["what"] == "probes":
            found += [run | {"reading": name} | line for name in READINGS for line in record["probes"][name]]
            continue
        for tolerance, sweep in zip(results["tolerances"], record["sweep"], strict=True):
            for number, u in enumerate(results["controls"]):
                counts = {f"nfe_{name}": values[number] for name, values in sweep.items()}
                found.append(run | {"tolerance": tolerance, "control": u} | counts)
    return found


def _group_by_solver(lines: pd.DataFrame) -> Iterator[tuple[dict[str, str], pd.DataFrame]]:
    """Yields the lines of each block, solver and tolerance, with the first cells of their row."""
    for (prompts, labels, solver, tolerance), own in groups(lines, "prompts", "labels", "what", "tolerance"):
        first = {"trained on": TRAINED_ON[prompts], "labels": labels, "solver": solver, "tolerance": f"{tolerance:g}"}
        yield first, own


def _regimes(lines: pd.DataFrame, title: str) -> Table:
    low, high = f"u < {BOUNDARY}", f"u > {BOUNDARY}"
    paper = {"trained on": "the paper", "labels": "own", "solver": "dopri5", "steps": "common", low: "20", high: "14"}
    rows: list[dict[str, Any]] = [paper]
    for first, own in _group_by_solver(lines):
        for way, name in {"common": "common", "last": "last token's", "mean": "by token, mean"}.items():
            curves = [curve for _, curve in own.groupby("seed")]
            below, above = ([_side(c.control, c[f"nfe_{way}"], side) for c in curves] for side in (True, False))
            rows.append(first | {"steps": name, low: format_seeds(below, 1), high: format_seeds(above, 1)})
    return table(title, rows)


def _side(controls: Sequence[float], counts: Sequence[float], below: bool) -> float:
    return fmean(count for u, count in zip(controls, counts, strict=True) if (u < BOUNDARY) == below)


def _causes(lines: pd.DataFrame, records: Sequence[dict[str, Any]]) -> Table:
    priors = pd.DataFrame(records).groupby(["prompts", "labels", "what"]).prior
    rows = []
    for first, own in _group_by_solver(lines):
        prior = priors.get_group(tuple(own.iloc[0][["prompts", "labels", "what"]]))
        for way, name in {"common": "paper's prompt, common", "others": "new prompts' last tokens"}.items():
            fits = [fit_effort(curve.control, curve[f"nfe_{way}"]) for _, curve in own.groupby("seed")]
            _, slope, curvature = (format_seeds(values, 2) for values in zip(*fits, strict=True))
            counted = {"counted": name, "slope": slope, "curvature": curvature}
            rows.append(first | {"P(good) share before": format_seeds(prior, scale=LOGIT)} | counted)
    return table("is it the word or the block: NFE = level + slope u + curvature |u|", rows)


def _scaling(lines: pd.DataFrame) -> Table:
    rows: list[dict[str, Any]] = [*PAPER_SCALING]
    for (prompts, tolerance), own in groups(lines[lines.labels == "own"], "prompts", "tolerance"):
        for way, name in {"common": "common", "mean": "by token, mean"}.items():
            counts = {solver: found.groupby("seed")[f"nfe_{way}"].agg(fmean) for solver, found in groups(own, "what")}
            steps: dict[str, Any] = {solver: num_steps_of(way, solver, found) for solver, found in counts.items()}
            rows.append(
                {"trained on": TRAINED_ON[prompts], "tolerance": f"{tolerance:g}", "solved": name}
                | {f"NFE: {solver}": format_seeds(found, 1) for solver, found in counts.items()}
                | {f"steps: {solver}": format_seeds(found, 1) for solver, found in steps.items()}
                | {"steps: heun / dopri5": format_seeds(steps["adaptive_heun"] / steps["dopri5"], 2)}
            )
    return table("NFE and steps against tolerance, mean over u", rows)


def _neighbours(records: Sequence[dict[str, Any]]) -> Table:
    lines = [
        {name: record[name] for name in Run._fields} | {"tolerance": tolerance, "found": found}
        for record in records
        if record["what"] != "probes"
        for tolerance, found in zip(TOLERANCES_OF_NEIGHBOURS, record["neighbours"], strict=True)
    ]
    rows = []
    for first, own in _group_by_solver(pd.DataFrame(lines)):
        found = pd.DataFrame([*own.found])
        counted = {f"common {way}": format_seeds(found[f"common_{way}"].map(fmean), 1) for way in ("alone", "together")}
        ways = {"common": found.common_changed, "by token": found.by_token_changed}
        changed = {f"changed: {way}": f"{of.sum()} of {found.prompts.sum()}" for way, of in ways.items()}
        rows.append(first | counted | changed)
    return table("NFE of a prompt alone and among others, u = -1, 0, +1", rows)


def _probes(lines: pd.DataFrame) -> Table:
    rows = [
        {"trained on": TRAINED_ON[prompts], "labels": labels, "probe of": reading, "measured": measured}
        | {f"tau = {tau:g}": format_seeds(at_tau[kind], scale=LOGIT) for tau, at_tau in groups(own, "tau")}
        for (prompts, labels, reading), own in groups(lines, "prompts", "labels", "reading")
        for kind, measured in {"accuracy": "right", "shuffled": "right, shuffled labels"}.items()
    ]
    return table("linear probes: right on prompts never trained on", rows)


def _draw_sweep(lines: pd.DataFrame, panel: Any) -> None:
    for number, (tolerance, own) in enumerate(groups(lines, "tolerance")):
        for way, name, style in (("common", "common", "-"), ("last", "last token", ":")):
            label, color = f"{tolerance:g}, {name}", f"C{number}"
            draw_band(panel, own, "control", f"nfe_{way}", label, color, linestyle=style, **DOTS)
    panel.axvline(BOUNDARY, color="grey", lw=0.8, ls="--")
    finish(panel, "u", "NFE", f'dopri5 on "{PAPER_PROMPT}", by tolerance')


def _draw_labels(lines: pd.DataFrame, panel: Any) -> None:
    for number, ((prompts, labels), own) in enumerate(groups(lines, "prompts", "labels")):
        label = f"{TRAINED_ON[prompts]}, {labels} labels"
        draw_band(panel, own, "control", "nfe_others", label, f"C{number}", **DOTS)
    finish(panel, "u", "NFE, mean", f"dopri5, last tokens of new prompts, {lines.tolerance.iloc[0]:g}")


def _draw_scaling(lines: pd.DataFrame, panel: Any) -> None:
    for number, (solver, own) in enumerate(groups(lines, "what")):
        means = own.groupby(["seed", "tolerance"], sort=False)[["nfe_common", "nfe_mean"]].agg(fmean).reset_index()
        for way, name, style in (("common", "common", "-"), ("mean", "by token", ":")):
            steps = means.assign(steps=num_steps_of(way, solver, means[f"nfe_{way}"]))
            label, color = f"{solver}, {name}", f"C{number}"
            draw_band(panel, steps, "tolerance", "steps", label, color, LOG, linestyle=style, **DOTS)
    loosest = lines.tolerance.iloc[0]
    panel.plot([loosest, loosest / 1000], PAPER_STEPS, "kx", label="the paper, dopri5")
    finish(panel, "relative tolerance", "steps", f'steps on "{PAPER_PROMPT}", mean over u', log="xy")
    panel.invert_xaxis()


def _draw_probes(lines: pd.DataFrame, panel: Any) -> None:
    for number, (reading, own) in enumerate(groups(lines, "reading")):
        for column, label, style in (("accuracy", reading, "-"), ("shuffled", "shuffled labels", ":")):
            draw_band(panel, own, "tau", column, label, f"C{number}", LOGIT, linestyle=style, **DOTS)
    panel.set_ylim(0, 1.05)
    finish(panel, "tau", "right", "linear probes, block trained on many prompts")
