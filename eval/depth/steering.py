"""Does a control steer the next word, also after prompts and to words that it was not trained on?

The paper's table 2 and the sweep of figure 2, with what it lacks: held-out prompts and words, four other ways to steer
at the same depth, the same with more than the block trained, three dimensions at once, and the loss on ordinary text.

Axes: U values of the control, P prompts, N pairs of words, W words.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ..intervals import LINEAR, LOGIT, band, interval, shown
from ..results import Table, picture, set_log_scale
from ..results_store import Key, Record
from .data import described_line
from .experiment import Experiment
from .lexicon import DIMENSIONS, PAPER_PAIR, PAPER_PROMPT
from .pretraining import trained
from .steered import (
    BATCH,
    COEFFICIENTS,
    LEARNING_RATE,
    METHODS,
    PROMPTS_OF,
    TRAINED_ON,
    lexicon_of,
    num_steps,
    parts_of,
    steered_by,
)
from .steering_measures import GROUPS, ceiling, figures, measure_joint, pair_log_probs, text_loss
from .words import encode_word

CONTROLS, FEW_CONTROLS = np.linspace(-2, 2, 17).tolist(), [-2.0, -1.0, 0.0, 1.0, 2.0]
JOINT_METHODS = ("flow", "bias", "film")
PAPER = {1.0: (0.98, 0.002), -1.0: (0.002, 0.881), 0.0: (0.914, 0.033)}  # P(good), P(bad)
NAMES = {
    "flow": "flow",
    "step": "one discrete step",
    "bias": "bias vector",
    "film": "FiLM",
    "activation": "activation steering",
    "unfrozen": "all but embeddings and head",
    "everything": "everything",
}
KINDS = [(method, prompts) for prompts, methods in PROMPTS_OF.items() for method in methods]


class Run(NamedTuple):
    """`prompts`: paper, many, or joint, which is the control of several dimensions."""

    seed: int
    method: str
    prompts: str


class Steering(Experiment[Run]):
    kind = "depth_steering"
    unit = "model"
    about = (
        "A trained model is frozen, and what stands at the place of its middle layers learns to choose the next word "
        "by a control u: the positive word at +1, the negative one at -1; 0 is never trained. flow: the block's "
        "weights; one discrete step: the same block with a single Euler step, though it was trained with four before; "
        "bias vector: u times a vector added to the block's output; FiLM: scale and shift of the same layer's output "
        "in the baseline, the model without a flow; activation steering: u times the difference of mean activations "
        "of positive and negative texts, with the coefficient of least loss on the trained prompts. Two more are "
        "trained on the paper's prompt only, since the paper can be read so: all but embeddings and head, and "
        "everything; the ceiling below does not hold for them. "
        "P is the probability of a whole word over the whole vocabulary: the "
        "product of the probabilities of its tokens, and the last norm and the head, which stay frozen, set its "
        "ceiling for any hidden state. Share: P(positive) / (P(positive) + P(negative)). Right: the word "
        "that u asks for is the likelier of its pair; a model without control is right in 50 %. Held-out prompts are "
        "of other subjects than the trained ones. Intervals are 95 % t intervals over seeds; each seed has its own "
        "model and holds out other prompts and words."
    )

    def settings(self) -> dict[str, Any]:
        return super().settings() | {
            "steering": {"steps": num_steps(self.setup), "batch": BATCH, "learning_rate": LEARNING_RATE,
                         "coefficients": list(COEFFICIENTS)},
            "controls": self.controls,
            "lexicon": lexicon_of(self.setup).fingerprint(),
        }  # fmt: skip

    @property
    def controls(self) -> list[float]:
        return FEW_CONTROLS if self.options.small else CONTROLS

    def items(self) -> list[Run]:
        kinds = [*KINDS, *product(JOINT_METHODS, ("joint",))]
        return [Run(seed, method, prompts) for seed in self.seeds for method, prompts in kinds]

    def key(self, item: Run) -> Key:
        return item._asdict()

    def measure(self, item: Run) -> Record:
        if item.prompts == "joint":
            return measure_joint(item.method, item.seed, self.setup, self.output)
        before = trained("baseline" if item.method == "film" else "hybrid", item.seed, self.setup, self.output)
        model = steered_by(item.method, item.seed, self.setup, self.output, item.prompts)  # type: ignore[arg-type]
        parts, tokenizer = parts_of(item.prompts, item.seed, self.setup), self.setup.corpus.tokenizer  # type: ignore[arg-type]
        prompts, pairs = (*parts.train_prompts, *parts.test_prompts), (*parts.train_pairs, *parts.test_pairs)
        log_UPN2 = pair_log_probs(model, tokenizer, prompts, pairs, self.controls)
        paper_U2 = log_UPN2[:, prompts.index(PAPER_PROMPT), pairs.index(PAPER_PAIR)].exp()
        halves = [slice(None, len(parts.train_prompts)), slice(len(parts.train_prompts), None)]
        sides = [slice(None, len(parts.train_pairs)), slice(len(parts.train_pairs), None)]
        groups = [log_UPN2[:, half][:, :, side] for side, half in product(sides, halves)]
        before_2 = pair_log_probs(before, tokenizer, [PAPER_PROMPT], [PAPER_PAIR], [0.0])[0, 0, 0].exp()
        return {
            "before": before_2.tolist(),
            "ceiling": [ceiling(before, encode_word(tokenizer, word)) for word in PAPER_PAIR],
            "good": paper_U2[:, 0].tolist(),
            "bad": paper_U2[:, 1].tolist(),
            "groups": {name: figures(group, self.controls) for name, group in zip(GROUPS, groups, strict=True)},
            "text_loss_before": text_loss(before, self.setup, 0.0),
            "text_loss": {str(u): text_loss(model, self.setup, u) for u in (0.0, 1.0, -1.0)},
        }

    def summarise(self, measured: Sequence[tuple[Run, Record]]) -> dict[str, Any]:
        return {"records": [item._asdict() | record for item, record in measured]}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        """A line per model, group and control; of the joint control, per model, group, setting and dimension."""
        found = []
        for record in results["records"]:
            run = {name: record[name] for name in Run._fields}
            for group, values in record["groups"].items():
                if record["prompts"] == "joint":
                    found += [
                        run | {"group": group, "setting": str(setting), "dimension": name, "accuracy": accuracy}
                        for name, row in zip(DIMENSIONS, values["accuracy"], strict=True)
                        for setting, accuracy in zip(record["settings"], row, strict=True)
                    ]
                    continue
                for number, u in enumerate(results["controls"]):
                    paper = {"p_good": record["good"][number], "p_bad": record["bad"][number]}
                    found.append(run | {"group": group, "control": u, "share": values["share"][number]} | paper)
        return found

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        data = described_line(results["corpus"], results["size"]["vocab_size"])
        return [
            Table(f'"{PAPER_PROMPT}", {" or ".join(PAPER_PAIR)}: {data}', *_paper_table(results)),
            Table("right where each is trained on one prompt or on many", *_accuracy_table(results)),
            Table("prompts and words never trained on, for the models trained on many", *_held_out_table(results)),
            Table("loss on held-out text, after minus before the steering", *_cost_table(results)),
            Table("three dimensions at once: right over all settings of the others", *_joint_table(results)),
            Table(
                "what a control does to all dimensions as it goes from -1 to +1: new prompts", *_effect_table(results)
            ),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        with picture(path, columns=3, figsize=(14, 3.8)) as axes:
            _draw_paper(results, axes[0])
            _draw_sweep(results, axes[1])
            _draw_accuracy(results, axes[2])
        with picture(path.with_name(f"{path.name}-dimensions"), columns=3, figsize=(11, 3.6)) as axes:
            for panel, method in zip(axes, JOINT_METHODS, strict=True):
                _draw_effects(results, method, panel)


DOTS: dict[str, Any] = {"marker": ".", "markersize": 3}


def _of(results: dict[str, Any], method: str, prompts: str) -> list[dict[str, Any]]:
    return [r for r in results["records"] if r["method"] == method and r["prompts"] == prompts]


def _effects(results: dict[str, Any], method: str) -> list[list[list[float]]]:
    return [record["groups"]["new prompts"]["effects"] for record in _of(results, method, "joint")]


def _paper_table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["trained on", "method", "u", "P(good)", "P(bad)", "share of good"]
    rows: list[list[Any]] = [
        ["the paper", "flow", f"{u:+g}", good, bad, f"{good / (good + bad):.3f}"] for u, (good, bad) in PAPER.items()
    ]
    records = _of(results, "flow", "paper")
    for name, field in (("not trained", "before"), ("the most that a frozen last norm and head allow", "ceiling")):
        good, bad = ([record[field][side] for record in records] for side in (0, 1))
        share = [g / (g + b) for g, b in zip(good, bad, strict=True)] if field == "before" else []
        rows.append(
            [
                name,
                "-",
                "0" if field == "before" else "any",
                shown(good, 4, LOGIT),
                shown(bad, 4, LOGIT),
                shown(share, scale=LOGIT),
            ]
        )
    for (method, prompts), u in product(KINDS, PAPER):
        records, at = _of(results, method, prompts), results["controls"].index(u)
        good, bad = ([record[word][at] for record in records] for word in ("good", "bad"))
        share = [g / (g + b) for g, b in zip(good, bad, strict=True)]
        rows.append(
            [
                TRAINED_ON[prompts],
                NAMES[method],
                f"{u:+g}",
                shown(good, 4, LOGIT),
                shown(bad, 4, LOGIT),
                shown(share, scale=LOGIT),
            ]
        )
    return columns, rows


def _accuracy_table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = [
        [
            TRAINED_ON[prompts],
            NAMES[method],
            *(
                shown([record["groups"][group]["accuracy"] for record in _of(results, method, prompts)], scale=LOGIT)
                for group in GROUPS
            ),
        ]
        for method, prompts in KINDS
    ]
    return ["trained on", "method", *GROUPS], rows


def _held_out_table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["method", "group", "right", "P(asked word)", "log odds from u = -1 to +1"]
    rows = []
    for method, group in product(METHODS, GROUPS):
        values = [record["groups"][group] for record in _of(results, method, "many")]
        scales = {"accuracy": LOGIT, "asked": LOGIT, "shift": LINEAR}
        cells = [shown([value[name] for value in values], scale=scale) for name, scale in scales.items()]
        rows.append([NAMES[method], group, *cells])
    return columns, rows


def _cost_table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["trained on", "method", "before", "u = 0", "u = +1", "u = -1"]
    rows = []
    for method, prompts in KINDS:
        records = _of(results, method, prompts)
        costs = [
            shown([record["text_loss"][u] - record["text_loss_before"] for record in records])
            for u in ("0.0", "1.0", "-1.0")
        ]
        rows.append(
            [TRAINED_ON[prompts], NAMES[method], shown([record["text_loss_before"] for record in records]), *costs]
        )
    return columns, rows


def _joint_table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["method", "group", *DIMENSIONS, "in the worst setting"]
    rows = []
    for method, group in product(JOINT_METHODS, GROUPS):
        values = [record["groups"][group]["accuracy"] for record in _of(results, method, "joint")]
        cells = [shown([fmean(value[number]) for value in values], scale=LOGIT) for number in range(len(DIMENSIONS))]
        rows.append([NAMES[method], group, *cells, shown([min(map(min, value)) for value in values], scale=LOGIT)])
    return columns, rows


def _effect_table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = ["method", "control of", *(f"log odds of {name}" for name in DIMENSIONS)]
    rows = []
    for method, (number, name) in product(JOINT_METHODS, enumerate(DIMENSIONS)):
        by_dimension = zip(*(effects[number] for effects in _effects(results, method)), strict=True)
        rows.append([NAMES[method], name, *(shown(values, 2) for values in by_dimension)])
    return columns, rows


def _draw_paper(results: dict[str, Any], panel: Any) -> None:
    for number, (name, color) in enumerate((("good", "tab:green"), ("bad", "tab:red"))):
        for method, style in (("flow", "-"), ("unfrozen", ":")):
            curves = [record[name] for record in _of(results, method, "paper")]
            band(
                panel, results["controls"], curves, f"P({name}), {NAMES[method]}", color, LOGIT, linestyle=style, **DOTS
            )
        values = [paper[number] for paper in PAPER.values()]
        panel.plot(list(PAPER), values, "x", color=color, label=f"P({name}), the paper")
    panel.set_title(f'trained on "{PAPER_PROMPT}"', fontsize=10)
    panel.set_xlabel("u")
    panel.set_ylabel("probability of the word")
    set_log_scale(panel, "y")
    panel.set_ylim(1e-8, 3)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=6, loc="lower left")


def _draw_sweep(results: dict[str, Any], panel: Any) -> None:
    uncontrolled = list(results["controls"]).index(0)
    for number, method in enumerate(METHODS):
        shares = [record["groups"]["new prompts"]["share"] for record in _of(results, method, "many")]
        odds = [[LOGIT.to(min(max(share, 1e-12), 1 - 1e-12)) for share in own] for own in shares]
        curves = [[value - own[uncontrolled] for value in own] for own in odds]
        band(panel, results["controls"], curves, NAMES[method], f"C{number}", **DOTS)
    panel.set_title("trained on many prompts: new prompts", fontsize=10)
    panel.set_xlabel("u")
    panel.set_ylabel("log odds of the positive word's share,\nminus those at u = 0")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def _draw_accuracy(results: dict[str, Any], panel: Any) -> None:
    width = 0.8 / len(METHODS)
    for number, method in enumerate(METHODS):
        records = _of(results, method, "many")
        found = [interval([record["groups"][group]["accuracy"] for record in records], LOGIT) for group in GROUPS]
        places = [at + (number - (len(METHODS) - 1) / 2) * width for at in range(len(GROUPS))]
        panel.bar(places, [mean for mean, _, _ in found], width, label=NAMES[method], color=f"C{number}")
        for at, (_, low, high) in zip(places, found, strict=True):
            if low is not None:
                panel.plot([at, at], [low, high], color="black", lw=0.8)
    panel.axhline(0.5, color="grey", ls="--", lw=0.8)
    panel.set_xticks(range(len(GROUPS)), GROUPS)
    panel.set_ylim(0, 1.3)
    panel.set_ylabel("the asked word is the likelier")
    panel.set_title("trained on many prompts", fontsize=10)
    panel.legend(fontsize=7, ncols=2, loc="upper center")


def _draw_effects(results: dict[str, Any], method: str, panel: Any) -> None:
    effects = np.mean(_effects(results, method), axis=0)
    most = max(float(np.abs(effects).max()), 1e-6)
    panel.imshow(effects, cmap="RdBu", vmin=-most, vmax=most)
    for (row, column), value in np.ndenumerate(effects):
        color = "white" if abs(value) > 0.6 * most else "black"
        panel.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
    panel.set_xticks(range(len(DIMENSIONS)), DIMENSIONS)
    panel.set_yticks(range(len(DIMENSIONS)), DIMENSIONS)
    panel.set_xlabel("change of the log odds of")
    panel.set_ylabel("control, from -1 to +1")
    panel.set_title(f"{NAMES[method]}, new prompts", fontsize=10)
