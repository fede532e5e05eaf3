"""Trains depth and fold together: the quickstart's passkey model, with one flow with shared weights as its layers."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from transformers import PreTrainedTokenizerFast

from condense import CondenseForCausalLM
from condense.eval.models import EvaluatedModel
from condense.eval.results import Table, picture
from condense.eval.results_store import Key, Record
from condense.eval.runner import Results, measure
from condense.eval.statistics import wilson
from condense.eval.study.training import PAPERS_MEMORY, make_once, train_alone
from condense.eval.tasks.options import PasskeyOptions
from condense.eval.tasks.passkey import Passkey
from condense.training.launch import launch, load_local_recipe
from condense.training.output_lock import was_finished
from condense.training.recipe import load_recipe
from condense.training.small_llama import save_small_llama
from condense.utils.notices import without_notices

from ..model import convert_to_depth, set_solver
from .experiment import Experiment
from .lines import groups, table
from .options import DepthOptions

RECIPE = "passkey_quickstart"
SEGMENT = 40  # tokens, as in the quickstart
TRAINED = 16  # segments of the longest texts of the recipe
FAR = 64  # segments of the comparison


@dataclass(frozen=True)
class Arm:
    """A small Llama with `layers`; with `flow`, one depth block with these settings replaces them all."""

    name: str
    described: str
    layers: int
    flow: dict[str, Any] = field(default_factory=dict)

    @property
    def evaluations(self) -> int:
        """The number of layers that a token passes through."""
        return self.flow.get("steps", self.layers)


ARMS = (
    Arm("discrete2", "two layers", 2),
    Arm("discrete1", "one layer", 1),
    Arm("repeated2", "one layer, twice (flow with alpha fixed at 2)", 2, {"steps": 2, "learn_alpha": False}),
    Arm("flow2", "flow, 2 Euler steps, alpha learned from 2", 2, {"steps": 2}),
    Arm("flow4", "flow, 4 Euler steps, alpha learned from 2", 2, {"steps": 4}),
)


@dataclass(frozen=True)
class Scale:
    """The lengths of the texts and the number of questions."""

    segments: tuple[int, ...] = (2, 4, 8, TRAINED, 32, FAR, 256)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    prompts: int = 20  # per length and depth
    other_steps: tuple[int, ...] = (1, 2, 3, 4, 6, 8)  # Euler steps of a trained flow, at `FAR` segments


FULL = Scale()
SMALL = Scale(segments=(2, 4), depths=(0.0, 1.0), prompts=1, other_steps=(1,))
SMALL_RUN = (
    "curriculum.steps=2",
    "curriculum.tokens_per_step=640",
    "optimizer.warmup_steps=1",
    "optimizer.decay_steps=1",
)


class Trained(NamedTuple):
    arm: Arm
    seed: int


class Fold(Experiment[Trained]):
    """Trains each arm with the quickstart's recipe through the launcher, and asks it for passkeys in longer texts."""

    kind = "depth_fold"
    unit = "model"
    about = (
        "The quickstart's passkey model, its recipe and its curriculum of 2 to 16 segments of 40 tokens. A flow has "
        "the weights of one layer, used at each Euler step; its memory is the state at its end, for all steps. One "
        "layer used twice is the same flow with alpha fixed at 2. An answer counts when all of its digits are right. "
        "Shares are listed by seed; a single seed has Wilson's 95 % interval."
    )

    def __init__(self, options: DepthOptions, output: Path):
        super().__init__(options, output)
        self.scale = SMALL if options.small else FULL
        for name in ("text", "held_out"):
            if getattr(options, name) is not None:
                print(f"the experiment fold generates its passkey texts: {name} is not used")

    def settings(self) -> dict[str, Any]:
        """Returns the settings without the number of seeds: runs with more seeds resume."""
        return {
            "small": self.options.small, "recipe": RECIPE, "segment": SEGMENT, "segments": list(self.scale.segments),
            "depths": list(self.scale.depths), "prompts": self.scale.prompts, "steps": list(self.scale.other_steps),
        }  # fmt: skip

    def items(self) -> list[Trained]:
        return [Trained(arm, seed) for seed in self.seeds for arm in ARMS]

    def key(self, item: Trained) -> Key:
        return {"arm": item.arm.name, "seed": item.seed}

    def measure(self, item: Trained) -> Record:
        arm, folder = item.arm, self.output / "models" / f"fold-{item.arm.name}-{item.seed}" / "trained"
        seconds = self._train(item, folder)
        model = CondenseForCausalLM.from_pretrained(folder).eval()
        evaluated = EvaluatedModel(arm.name, str(folder), model, PreTrainedTokenizerFast.from_pretrained(folder))
        record = {
            "parameters": model.num_parameters(),
            "layer_parameters": sum(parameter.numel() for parameter in model.model.layers.parameters()),
            "training_s": seconds,
            "milestones": json.loads((folder / "curriculum.json").read_text())["milestones"],
            "found": self._found(evaluated, self.scale.segments, item.seed),
            "alpha": model.model.layers[0].alpha.item() if arm.flow else None,
            "found_with_steps": {},
        }
        for steps in self.scale.other_steps if arm.flow else ():
            set_solver(model, "euler", steps=steps)
            (found,) = self._found(evaluated, [min(FAR, self.scale.segments[-1])], item.seed)
            record["found_with_steps"][str(steps)] = found
        return record

    def _train(self, item: Trained, folder: Path) -> float | None:
        """Trains the model in `folder`; returns the seconds, or None if it was finished before.

        A stopped run resumes from its last checkpoint.
        """
        start = make_once(folder.with_name("start"), partial(_write_start, item, folder.with_name("llama")))
        if was_finished(folder):
            return None
        overrides = [f"model={start}", f"output={folder}", f"seed={item.seed}"]
        begun = time.perf_counter()
        if self.options.small:
            train_alone(load_recipe(RECIPE, [*overrides, *SMALL_RUN]))
        else:
            launch(load_local_recipe(RECIPE, overrides))
        return round(time.perf_counter() - begun, 1)

    def _found(self, evaluated: EvaluatedModel, segments: Sequence[int], seed: int) -> list[dict[str, int]]:
        """Counts the passkeys found at each number of segments, over all depths of the key."""
        options = PasskeyOptions(
            models=[], lengths=[SEGMENT * number for number in segments], depths=self.scale.depths,
            num_prompts=self.scale.prompts, seed=seed,
        )  # fmt: skip
        task = Passkey(options, [evaluated])
        cells = pd.DataFrame(task.summarise(measure(task))["cells"])
        counts = cells.groupby("length")[["correct", "total"]].sum()
        return [{"segments": number, **counts.loc[SEGMENT * number].to_dict()} for number in segments]

    def summarise(self, measured: Sequence[tuple[Trained, Record]]) -> dict[str, Any]:
        described = {arm.name: {"described": arm.described, "evaluations": arm.evaluations} for arm in ARMS}
        return {"arms": described} | super().summarise(measured)

    def rows(self, results: Results) -> list[dict[str, Any]]:
        """Returns a line per model, number of Euler steps (if not the trained one) and number of segments."""
        lines = []
        for record in results["records"]:
            named = {name: record[name] for name in ("arm", "seed", "parameters", "layer_parameters", "alpha")}
            trained = results["arms"][record["arm"]]["evaluations"]
            others = {int(steps): found for steps, found in record["found_with_steps"].items()}
            lines += [named | {"evaluations": trained} | found for found in record["found"]]
            lines += [named | {"evaluations": n} | found for n, found in others.items() if n != trained]
        return lines

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        rows, steps_rows, alpha = [], [], "alpha after training"
        for arm, own in _by_arm(results):
            first, reached = own.iloc[0], [milestones[-1][1] for milestones in own.milestones]
            rows.append(
                {
                    "arm": arm,
                    "seeds": len(own),
                    "evaluations": results["arms"][first.arm]["evaluations"],
                    "parameters of the layers": f"{first.layer_parameters:,}",
                    "in all": f"{first.parameters:,}",
                    "longest trained [segments]": _span(reached),
                }
                | {f"{found[0]['segments']} segments: % found": _share(found) for found in zip(*own.found, strict=True)}
            )
            if first.found_with_steps:
                by_steps = {n: [found[str(n)] for found in own.found_with_steps] for n in results["steps"]}
                found = {f"{n} steps: % found": _share(counts) for n, counts in by_steps.items()}
                steps_rows.append({"arm": arm, alpha: ", ".join(f"{value:.2f}" for value in own.alpha)} | found)
        segments = min(FAR, results["segments"][-1])
        return [
            table("passkeys found, all depths of the key together, by seed", rows),
            table(f"trained flows read with other numbers of Euler steps, {segments} segments", steps_rows),
        ]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        with picture(path, columns=2, figsize=(11, 4.2)) as (lengths, training):
            for number, (arm, own) in enumerate(_by_arm(results)):
                look = {"color": f"C{number}", "marker": "osD^v"[number], "markersize": 4, "linewidth": 1.2}
                for which, record in enumerate(own.itertuples()):
                    label = arm if which == 0 else None
                    shares = [100 * found["correct"] / found["total"] for found in record.found]
                    lengths.plot(results["segments"], shares, label=label, **look)
                    training.step(*zip(*record.milestones, strict=True), where="post", label=label, **look)
            lengths.axvline(TRAINED, color="grey", linestyle=":", label="longest text of the curriculum")
            lengths.set(xlabel="segments of the text", ylabel="passkeys found [%]", ylim=(-3, 103))
            lengths.set_xscale("log", base=2)
            lengths.set_xticks(results["segments"], map(str, results["segments"]))
            training.set(xlabel="training step", ylabel="segments of the training texts")
            training.legend(fontsize=7)


def _write_start(item: Trained, llama: Path, folder: Path) -> None:
    """Writes a small Llama, and the model made of it that the training of an arm begins with."""
    save_small_llama(llama, item.seed, layers=item.arm.layers)
    with without_notices():  # it is to be trained
        model = CondenseForCausalLM.from_pretrained(llama, segment_length=SEGMENT, **PAPERS_MEMORY)
    if item.arm.flow:
        convert_to_depth(model, 0, item.arm.layers, field="layer", control_size=0, **item.arm.flow)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(llama).save_pretrained(folder)


def _by_arm(results: Results) -> list[tuple[str, pd.DataFrame]]:
    """Returns each arm's description and records."""
    records = pd.DataFrame(results["records"])
    return [(results["arms"][arm]["described"], own) for arm, own in groups(records, "arm")]


def _share(counts: Sequence[dict[str, int]]) -> str:
    """Formats the shares found [%] by seed, too different for a mean; a single seed gets Wilson's interval."""
    shares = ", ".join(f"{100 * count['correct'] / count['total']:.0f}" for count in counts)
    if len(counts) > 1:
        return shares
    low, high = wilson(counts[0]["correct"], counts[0]["total"])
    return f"{shares} ({100 * low:.0f} to {100 * high:.0f})"


def _span(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"
