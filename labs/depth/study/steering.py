"""Measures whether a control steers the next word, also with prompts and words that it was not trained on.

Repeats the paper's table 2 and the sweep of figure 2, with additions: held-out prompts and words, four other ways to
steer at the same depth, training of more than the block, three dimensions at once, and the loss on ordinary text.

Axes: U values of the control, P prompts, N pairs of words, R seeds.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import logit

from condense.eval.intervals import LOGIT, band, format_seeds, interval
from condense.eval.results import Table, picture
from condense.eval.results_store import Record

from .data import described_line
from .experiment import Experiment
from .lexicon import DIMENSIONS, PAPER_PAIR, PAPER_PROMPT
from .lines import finish, groups, table
from .pretraining import pretrain
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

DOTS: dict[str, Any] = {"marker": ".", "markersize": 3}
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
    """`prompts`: paper, many, or joint (a control of several dimensions)."""

    seed: int
    method: str
    prompts: str


class Steering(Experiment[Run]):
    kind = "depth_steering"
    unit = "model"
    about = (
        "A trained model is frozen, and the part in place of its middle layers learns to choose the next word by a "
        "control u: the positive word at +1, the negative one at -1; 0 is never trained. flow: the block's weights; "
        "one discrete step: the same block with a single Euler step; bias vector: u times a vector added to the "
        "block's output; FiLM: scale and shift of the same layer's output in the baseline; activation steering: u "
        "times the difference of mean activations of positive and negative texts, with the best coefficient on the "
        "trained prompts. Two more are trained only on the paper's prompt: all but embeddings and head, and "
        "everything. P is the probability of a whole word over the whole vocabulary. If the last norm and the head are "
        "frozen, they set its ceiling. Share: P(positive) / (P(positive) + P(negative)). Right: the word that u asks "
        "for is the likelier of its pair; a model without control is right in 50 %. Held-out prompts are about other "
        "subjects than the trained ones. Intervals are 95 % t intervals over seeds; each seed has its own model and "
        "holds out other prompts and words."
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

    def measure(self, item: Run) -> Record:
        if item.prompts == "joint":
            return measure_joint(item.method, item.seed, self.setup, self.output)
        kind: Any = item.prompts
        before = pretrain("baseline" if item.method == "film" else "hybrid", item.seed, self.setup, self.output)
        model = steered_by(item.method, item.seed, self.setup, self.output, kind)
        parts, tokenizer = parts_of(kind, item.seed, self.setup), self.setup.corpus.tokenizer
        prompts, pairs = (*parts.train_prompts, *parts.test_prompts), (*parts.train_pairs, *parts.test_pairs)
        log_UPN2 = pair_log_probs(model, tokenizer, prompts, pairs, self.controls)
        paper_U2 = log_UPN2[:, prompts.index(PAPER_PROMPT), pairs.index(PAPER_PAIR)].exp()
        before_2 = pair_log_probs(before, tokenizer, [PAPER_PROMPT], [PAPER_PAIR], [0.0])[0, 0, 0].exp()
        sides = log_UPN2.tensor_split([len(parts.train_pairs)], dim=2)
        groups = [group for side in sides for group in side.tensor_split([len(parts.train_prompts)], dim=1)]
        return {
            "before": before_2.tolist(),
            "ceiling": [ceiling(before, encode_word(tokenizer, word)) for word in PAPER_PAIR],
            "good": paper_U2[:, 0].tolist(),
            "bad": paper_U2[:, 1].tolist(),
            "groups": {name: figures(group, self.controls) for name, group in zip(GROUPS, groups, strict=True)},
            "text_loss_before": text_loss(before, self.setup, 0.0),
            "text_loss": {str(u): text_loss(model, self.setup, u) for u in (0.0, 1.0, -1.0)},
        }

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns a line per model, group and control; with joint control, per model, group, dimension and setting."""
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
        records, controls = pd.DataFrame(results["records"]), results["controls"]
        single, joint = records[records.prompts != "joint"], _groups(records[records.prompts == "joint"])
        data = described_line(results)
        return [
            _paper_table(single, controls, f'"{PAPER_PROMPT}", {" or ".join(PAPER_PAIR)}: {data}'),
            _accuracy_table(_groups(single)),
            _held_out_table(_groups(single[single.prompts == "many"])),
            _cost_table(single),
            _joint_table(joint),
            _effect_table(joint[joint.group == "new prompts"]),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        records, controls = pd.DataFrame(results["records"]), results["controls"]
        lines = _groups(records)
        many = lines[lines.prompts == "many"]
        with picture(path, columns=3, figsize=(14, 3.8)) as axes:
            _draw_paper(records[records.prompts == "paper"], controls, axes[0])
            _draw_sweep(many[many.group == "new prompts"], controls, axes[1])
            _draw_accuracy(many, axes[2])
        joint = lines[(lines.prompts == "joint") & (lines.group == "new prompts")]
        with picture(path.with_name(f"{path.name}-dimensions"), columns=3, figsize=(11, 3.6)) as axes:
            for panel, (method, own) in zip(axes, groups(joint, "method"), strict=True):
                _draw_effects(np.mean([*own.effects], axis=0), f"{NAMES[method]}, new prompts", panel)


share_of_seeds = partial(format_seeds, scale=LOGIT)


def _groups(records: pd.DataFrame) -> pd.DataFrame:
    """Returns a line per record and group of prompts and words, with its figures."""
    found = [
        {name: getattr(record, name) for name in Run._fields} | {"group": group} | values
        for record in records.itertuples()
        for group, values in record.groups.items()
    ]
    return pd.DataFrame(found)


def _name_cells(method: str, prompts: str) -> dict[str, Any]:
    """Returns the first cells of a model's row."""
    return {"trained on": TRAINED_ON[prompts], "method": NAMES[method]}


def _paper_table(records: pd.DataFrame, controls: Sequence[float], title: str) -> Table:
    def row(first: dict[str, Any], u: str, pairs: Iterable[Sequence[float]], share: bool = True) -> dict[str, Any]:
        """`pairs` are P(good) and P(bad) of each seed."""
        good, bad = (list(side) for side in zip(*pairs, strict=True))
        shares = [one / (one + other) for one, other in zip(good, bad, strict=True)] if share else []
        cells = {"P(good)": format_seeds(good, 4, LOGIT), "P(bad)": format_seeds(bad, 4, LOGIT)}
        return first | {"u": u} | cells | {"share of good": share_of_seeds(shares)}

    rows = [
        {"trained on": "the paper", "method": "flow", "u": f"{u:+g}", "P(good)": good, "P(bad)": bad}
        | {"share of good": f"{good / (good + bad):.3f}"}
        for u, (good, bad) in PAPER.items()
    ]
    flow = records[(records.method == "flow") & (records.prompts == "paper")]
    rows.append(row({"trained on": "not trained"}, "0", flow.before))
    rows.append(row({"trained on": "the most that a frozen last norm and head allow"}, "any", flow.ceiling, False))
    for kind, own in groups(records, "method", "prompts"):
        for u in PAPER:
            good, bad = (own[side].str[controls.index(u)] for side in ("good", "bad"))
            rows.append(row(_name_cells(*kind), f"{u:+g}", zip(good, bad, strict=True)))
    return table(title, rows)


def _accuracy_table(lines: pd.DataFrame) -> Table:
    rows = [
        _name_cells(*kind) | {group: share_of_seeds(found.accuracy) for group, found in groups(own, "group")}
        for kind, own in groups(lines, "method", "prompts")
    ]
    return table("right where each is trained on one prompt or on many", rows)


def _held_out_table(lines: pd.DataFrame) -> Table:
    rows = [
        {
            "method": NAMES[method],
            "group": group,
            "right": share_of_seeds(own.accuracy),
            "P(asked word)": share_of_seeds(own.asked),
            "log odds from u = -1 to +1": format_seeds(own["shift"]),
        }
        for (method, group), own in groups(lines, "method", "group")
    ]
    return table("prompts and words never trained on, for the models trained on many", rows)


def _cost_table(records: pd.DataFrame) -> Table:
    rows = []
    for kind, own in groups(records, "method", "prompts"):
        before, after = own.text_loss_before, pd.DataFrame([*own.text_loss], index=own.index)
        columns = {"u = 0": "0.0", "u = +1": "1.0", "u = -1": "-1.0"}
        costs = {column: format_seeds(after[u] - before) for column, u in columns.items()}
        rows.append(_name_cells(*kind) | {"before": format_seeds(before)} | costs)
    return table("loss on held-out text, after minus before the steering", rows)


def _joint_table(lines: pd.DataFrame) -> Table:
    rows = [
        {"method": NAMES[method], "group": group}
        | {name: share_of_seeds([fmean(found[at]) for found in own.accuracy]) for at, name in enumerate(DIMENSIONS)}
        | {"in the worst setting": share_of_seeds([min(map(min, found)) for found in own.accuracy])}
        for (method, group), own in groups(lines, "method", "group")
    ]
    return table("three dimensions at once: right over all settings of the others", rows)


def _effect_table(lines: pd.DataFrame) -> Table:
    rows = [
        {"method": NAMES[method], "control of": control}
        | {
            f"log odds of {name}": format_seeds([effects[c][d] for effects in own.effects], 2)
            for d, name in enumerate(DIMENSIONS)
        }
        for method, own in groups(lines, "method")
        for c, control in enumerate(DIMENSIONS)
    ]
    return table("what a control does to all dimensions as it goes from -1 to +1: new prompts", rows)


def _draw_paper(records: pd.DataFrame, controls: Sequence[float], panel: Any) -> None:
    for number, (name, color) in enumerate((("good", "tab:green"), ("bad", "tab:red"))):
        for method, style in (("flow", "-"), ("unfrozen", ":")):
            curves, label = records[records.method == method][name], f"P({name}), {NAMES[method]}"
            band(panel, controls, [*curves], label, color, LOGIT, linestyle=style, **DOTS)
        values = [paper[number] for paper in PAPER.values()]
        panel.plot(list(PAPER), values, "x", color=color, label=f"P({name}), the paper")
    title = f'trained on "{PAPER_PROMPT}"'
    finish(panel, "u", "probability of the word", title, log="y", fontsize=6, loc="lower left")
    panel.set_ylim(1e-8, 3)


def _draw_sweep(lines: pd.DataFrame, controls: Sequence[float], panel: Any) -> None:
    for number, (method, own) in enumerate(groups(lines, "method")):
        odds_RU = logit(np.clip(np.array([*own.share]), 1e-12, 1 - 1e-12))
        curves_RU = odds_RU - odds_RU[:, [controls.index(0)]]
        band(panel, controls, curves_RU.tolist(), NAMES[method], f"C{number}", **DOTS)
    y = "log odds of the positive word's share,\nminus those at u = 0"
    finish(panel, "u", y, "trained on many prompts: new prompts")


def _draw_accuracy(lines: pd.DataFrame, panel: Any) -> None:
    width = 0.8 / len(METHODS)
    for number, (method, own) in enumerate(groups(lines, "method")):
        found = [interval([*values], LOGIT) for _, values in own.groupby("group", sort=False).accuracy]
        places = [at + (number - (len(METHODS) - 1) / 2) * width for at in range(len(GROUPS))]
        panel.bar(places, [mean for mean, _, _ in found], width, label=NAMES[method], color=f"C{number}")
        for at, (_, *ends) in zip(places, found, strict=True):
            if None not in ends:
                panel.plot([at, at], ends, color="black", lw=0.8)
    panel.axhline(0.5, color="grey", ls="--", lw=0.8)
    panel.set_xticks(range(len(GROUPS)), GROUPS)
    panel.set(ylim=(0, 1.3), ylabel="the asked word is the likelier")
    panel.set_title("trained on many prompts", fontsize=10)
    panel.legend(fontsize=7, ncols=2, loc="upper center")


def _draw_effects(effects: np.ndarray, title: str, panel: Any) -> None:
    most = max(float(np.abs(effects).max()), 1e-6)
    panel.imshow(effects, cmap="RdBu", vmin=-most, vmax=most)
    for (row, column), value in np.ndenumerate(effects):
        color = "white" if abs(value) > 0.6 * most else "black"
        panel.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
    for ticks in (panel.set_xticks, panel.set_yticks):
        ticks(range(len(DIMENSIONS)), DIMENSIONS)
    panel.set(xlabel="change of the log odds of", ylabel="control, from -1 to +1")
    panel.set_title(title, fontsize=10)
