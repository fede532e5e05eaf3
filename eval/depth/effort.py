"""How many evaluations of the field an adaptive solver needs by the control, and what that says.

The paper's section 5.3 and figures 3 and 4, with what it lacks: steps by token instead of common steps for a batch, a
block trained with swapped labels, and probes with a held-out split and shuffled labels. All is solved in float64: at
tight tolerances the error estimate in float32 is rounding.

Axes: T tokens, n tokens of all prompts, D hidden size, N examples.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from ..intervals import LOG, LOGIT, band, shown
from ..results import Table, picture, set_log_scale
from ..results_store import Key, Record
from .data import described_line
from .evaluations import (
    BOUNDARY,
    READINGS,
    TAUS,
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
from .pretraining import trained
from .steered import TRAINED_ON, Labels, Prompts, lexicon_of, num_steps, parts_of, steered
from .steering import DOTS, FEW_CONTROLS
from .words import encode_prompt

SOLVERS = ("dopri5", "adaptive_heun")
CONTROLS = np.linspace(-2, 2, 9).tolist()
TOLERANCES, FEW_TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6), (1e-3, 1e-4)  # relative; the absolute one is a tenth
# adaptive_heun takes thousands of steps at smaller ones.
TOLERANCES_OF_NEIGHBOURS = (1e-3, 1e-4)
PAPER_STEPS = (2, 4)  # of 14 and 26 evaluations: at the loosest tolerance and at one 1000 times tighter
BLOCKS: tuple[tuple[Prompts, Labels], ...] = (
    ("paper", "own"),
    ("paper", "swapped"),
    ("many", "own"),
    ("many", "swapped"),
)


class Run(NamedTuple):
    """`what`: the solver, or probes."""

    seed: int
    prompts: Prompts
    labels: Labels
    what: str


class Effort(Experiment[Run]):
    kind = "depth_effort"
    unit = "run"
    about = (
        "NFE: evaluations of the field until tau = 1, solved in float64. common: one step size for all tokens, as in "
        "torchdiffeq and in the paper; by token: each token has steps of its own (torchode). The absolute tolerance is "
        "a tenth of the relative one. Two evaluations choose the first step. A step of dopri5 takes 6, so NFE is 8, "
        "14, 20, 26 ...: the paper's 14 and 20 differ by one step. A step of adaptive_heun takes 1 in torchdiffeq and "
        "2 in torchode: its NFE with common steps and by token are not comparable, its steps are. "
        "own: trained as in the experiment steering; swapped: with the negative word at "
        "u = +1. NFE is fitted by level + slope u + curvature |u|: a slope of the same sign for both labels is a "
        "property of the block, one that changes sign belongs to the words. Probes are logistic regressions on the "
        "last token's state at tau: of the sentiment of a text (prompt and word, u = 0), and of the sign of u (prompt "
        "at u = -1 and +1), always tested on prompts of subjects that were not trained. Shuffled labels are shuffled "
        "by word, and by prompt and u: what a probe finds of them is not sentiment. Intervals are 95 % t intervals "
        "over seeds."
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

    def key(self, item: Run) -> Key:
        return item._asdict()

    def measure(self, item: Run) -> Record:
        model = steered(item.seed, self.setup, self.output, item.labels, item.prompts)
        if item.what == "probes":
            return measure_probes(model, self.setup, item.seed)
        tokenizer = self.setup.corpus.tokenizer
        tested = parts_of("many", item.seed, self.setup).test_prompts
        starts = states_before(model, [encode_prompt(tokenizer, prompt) for prompt in (PAPER_PROMPT, *tested)])
        effort = Evaluations(model, item.what)
        found = {
            "sweep": [self._sweep(effort, starts, tolerance) for tolerance in self.tolerances],
            "neighbours": [neighbours(effort, starts, tolerance) for tolerance in TOLERANCES_OF_NEIGHBOURS],
        }
        return found | {"prior": prior_share(trained("hybrid", item.seed, self.setup, self.output), self.setup)}

    def _sweep(self, effort: "Evaluations", starts: Sequence[torch.Tensor], tolerance: float) -> dict[str, list[float]]:
        """By control: NFE of the paper's prompt alone, common, at its last token, and as a mean over its tokens; and
        of the last tokens of all other prompts, as a mean."""
        lasts_nD = torch.cat([start[-1:] for start in starts[1:]])
        found: dict[str, list[float]] = {"common": [], "last": [], "mean": [], "others": []}
        for u in self.controls:
            by_token = effort.by_token(starts[0], u, tolerance)
            found["common"].append(effort.common(starts[0], u, tolerance))
            found["last"].append(by_token[-1])
            found["mean"].append(fmean(by_token))
            found["others"].append(fmean(effort.by_token(lasts_nD, u, tolerance)))
        return found

    def summarise(self, measured: Sequence[tuple[Run, Record]]) -> dict[str, Any]:
        return {"records": [item._asdict() | record for item, record in measured]}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        """A line per block, solver, tolerance and control, and per block, tau and reading."""
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

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        data = described_line(results["corpus"], results["size"]["vocab_size"])
        return [
            Table(f'NFE below and above u = {BOUNDARY} on "{PAPER_PROMPT}": {data}', *_regimes(results)),
            Table("is it the word or the block: NFE = level + slope u + curvature |u|", *_causes(results)),
            Table("NFE and steps against tolerance, mean over u", *_scaling(results)),
            Table("NFE of a prompt alone and among others, u = -1, 0, +1", *_neighbours(results)),
            Table("linear probes: right on prompts never trained on", *_probes(results)),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        with picture(path, 2, 2, figsize=(11, 7.6)) as axes:
            _draw_sweep(results, axes[0, 0])
            _draw_labels(results, axes[0, 1])
            _draw_scaling(results, axes[1, 0])
            _draw_probes(results, axes[1, 1])


def _of(results: dict[str, Any], prompts: str, labels: str, what: str) -> list[dict[str, Any]]:
    wanted = (prompts, labels, what)
    return [r for r in results["records"] if (r["prompts"], r["labels"], r["what"]) == wanted]


def _regimes(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["trained on", "labels", "solver", "tolerance", "steps", f"u < {BOUNDARY}", f"u > {BOUNDARY}"]
    rows: list[list[Any]] = [["the paper", "own", "dopri5", "-", "common", "20", "14"]]
    ways = {"common": "common", "last": "last token's", "mean": "by token, mean"}
    for (prompts, labels), solver in product(BLOCKS, SOLVERS):
        for number, tolerance in enumerate(results["tolerances"]):
            for way, name in ways.items():
                curves = [record["sweep"][number][way] for record in _of(results, prompts, labels, solver)]
                sides = [[_side(results["controls"], c, below) for c in curves] for below in (True, False)]
                rows.append(
                    [TRAINED_ON[prompts], labels, solver, f"{tolerance:g}", name, *(shown(side, 1) for side in sides)]
                )
    return columns, rows


def _side(controls: Sequence[float], counts: Sequence[float], below: bool) -> float:
    return fmean(count for u, count in zip(controls, counts, strict=True) if (u < BOUNDARY) == below)


def _causes(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["trained on", "labels", "solver", "tolerance", "P(good) share before", "counted", "slope", "curvature"]
    rows = []
    for (prompts, labels), solver, (number, tolerance) in product(BLOCKS, SOLVERS, enumerate(results["tolerances"])):
        records = _of(results, prompts, labels, solver)
        for way, name in {"common": "paper's prompt, common", "others": "new prompts' last tokens"}.items():
            fits = [fit_effort(results["controls"], record["sweep"][number][way]) for record in records]
            prior = shown([record["prior"] for record in records], scale=LOGIT)
            slope, curvature = (shown([fit[at] for fit in fits], 2) for at in (1, 2))
            rows.append([TRAINED_ON[prompts], labels, solver, f"{tolerance:g}", prior, name, slope, curvature])
    return columns, rows


def _scaling(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["trained on", "tolerance", "solved", "NFE: dopri5", "NFE: adaptive_heun", "steps: dopri5",
               "steps: adaptive_heun", "steps: heun / dopri5"]  # fmt: skip
    rows: list[list[Any]] = [
        ["the paper", "loosest", "common", "14", "-", str(PAPER_STEPS[0]), "-", "0.85 to 1.15"],
        ["the paper", "1000 times tighter", "common", "26", "-", str(PAPER_STEPS[1]), "-", "-"],
    ]
    for prompts, (number, tolerance) in product(TRAINED_ON, enumerate(results["tolerances"])):
        for way, name in {"common": "common", "mean": "by token, mean"}.items():
            counts, steps = ([found(results, prompts, solver, way, number) for solver in SOLVERS]
                             for found in (_mean_evaluations, _mean_steps))  # fmt: skip
            ratio = [heun / dopri5 for dopri5, heun in zip(*steps, strict=True)]
            cells = [shown(values, 1) for values in (*counts, *steps)]
            rows.append([TRAINED_ON[prompts], f"{tolerance:g}", name, *cells, shown(ratio, 2)])
    return columns, rows


def _mean_evaluations(results: dict[str, Any], prompts: str, solver: str, way: str, number: int) -> list[float]:
    """By seed, at tolerance `number`, the mean over u."""
    return [fmean(record["sweep"][number][way]) for record in _of(results, prompts, "own", solver)]


def _mean_steps(results: dict[str, Any], prompts: str, solver: str, way: str, number: int) -> list[float]:
    return [num_steps_of(way, solver, count) for count in _mean_evaluations(results, prompts, solver, way, number)]


def _neighbours(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = [
        "trained on",
        "labels",
        "solver",
        "tolerance",
        "common alone",
        "common together",
        "changed: common",
        "changed: by token",
    ]
    rows = []
    for (prompts, labels), solver in product(BLOCKS, SOLVERS):
        for number, tolerance in enumerate(TOLERANCES_OF_NEIGHBOURS):
            found = [record["neighbours"][number] for record in _of(results, prompts, labels, solver)]
            total = sum(values["prompts"] for values in found)
            changed = [sum(values[f"{way}_changed"] for values in found) for way in ("common", "by_token")]
            means = [
                shown([fmean(values[name]) for values in found], 1) for name in ("common_alone", "common_together")
            ]
            run = [TRAINED_ON[prompts], labels, solver]
            rows.append([*run, f"{tolerance:g}", *means, *(f"{count} of {total}" for count in changed)])
    return columns, rows


def _probes(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["trained on", "labels", "probe of", "measured", *(f"tau = {tau:g}" for tau in TAUS)]
    rows = []
    for (prompts, labels), reading, kind in product(BLOCKS, READINGS, ("accuracy", "shuffled")):
        by_seed = [record["probes"][reading] for record in _of(results, prompts, labels, "probes")]
        cells = [shown([lines[number][kind] for lines in by_seed], scale=LOGIT) for number in range(len(TAUS))]
        name = "right" if kind == "accuracy" else "right, shuffled labels"
        rows.append([TRAINED_ON[prompts], labels, reading, name, *cells])
    return columns, rows


def _draw_sweep(results: dict[str, Any], panel: Any) -> None:
    records = _of(results, "paper", "own", "dopri5")
    for number, tolerance in enumerate(results["tolerances"]):
        for way, style in (("common", "-"), ("last", ":")):
            curves = [record["sweep"][number][way] for record in records]
            label = f"{tolerance:g}, {'common' if way == 'common' else 'last token'}"
            band(panel, results["controls"], curves, label, f"C{number}", linestyle=style, **DOTS)
    panel.axvline(BOUNDARY, color="grey", lw=0.8, ls="--")
    panel.set_title(f'dopri5 on "{PAPER_PROMPT}", by tolerance', fontsize=10)
    _finish(panel, "u", "NFE")


def _draw_labels(results: dict[str, Any], panel: Any) -> None:
    for color, (prompts, labels) in enumerate(BLOCKS):
        curves = [record["sweep"][-1]["others"] for record in _of(results, prompts, labels, "dopri5")]
        band(panel, results["controls"], curves, f"{TRAINED_ON[prompts]}, {labels} labels", f"C{color}", **DOTS)
    panel.set_title(f"dopri5, last tokens of new prompts, {results['tolerances'][-1]:g}", fontsize=10)
    _finish(panel, "u", "NFE, mean")


def _draw_scaling(results: dict[str, Any], panel: Any) -> None:
    tolerances = results["tolerances"]
    for color, solver in enumerate(SOLVERS):
        for way, style in (("common", "-"), ("mean", ":")):
            by_tolerance = [_mean_steps(results, "paper", solver, way, number) for number in range(len(tolerances))]
            label = f"{solver}, {'common' if way == 'common' else 'by token'}"
            band(
                panel,
                tolerances,
                list(zip(*by_tolerance, strict=True)),
                label,
                f"C{color}",
                LOG,
                linestyle=style,
                **DOTS,
            )
    panel.plot([tolerances[0], tolerances[0] / 1000], PAPER_STEPS, "kx", label="the paper, dopri5")
    set_log_scale(panel, "x")
    set_log_scale(panel, "y")
    panel.invert_xaxis()
    panel.set_title(f'steps on "{PAPER_PROMPT}", mean over u', fontsize=10)
    _finish(panel, "relative tolerance", "steps")


def _draw_probes(results: dict[str, Any], panel: Any) -> None:
    for color, reading in enumerate(READINGS):
        for kind, style in (("accuracy", "-"), ("shuffled", ":")):
            records = _of(results, "many", "own", "probes")
            curves = [[line[kind] for line in record["probes"][reading]] for record in records]
            label = reading if kind == "accuracy" else "shuffled labels"
            band(panel, TAUS, curves, label, f"C{color}", LOGIT, linestyle=style, **DOTS)
    panel.set_ylim(0, 1.05)
    panel.set_title("linear probes, block trained on many prompts", fontsize=10)
    _finish(panel, "tau", "right")


def _finish(panel: Any, x: str, y: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
