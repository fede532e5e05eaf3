"""Depth and fold together: the quickstart's passkey model, with one flow with shared weights as its layers."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from transformers import PreTrainedTokenizerFast

from condense import CondenseForCausalLM
from condense.depth import convert_to_depth, set_solver
from condense.training.launch import launch, load_local_recipe
from condense.training.output_lock import was_finished
from condense.training.small_llama import save_small_llama

from ..models import EvaluatedModel
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results, measure
from ..statistics import wilson
from ..tasks.options import PasskeyOptions
from ..tasks.passkey import Passkey
from .experiment import Experiment
from .lines import groups
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
    """The amount of training and of questions."""

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
        "Shares are those of each seed in turn; of one seed with Wilson's 95 % interval."
    )

    def __init__(self, options: DepthOptions, output: Path):
        super().__init__(options, output)
        self.scale = SMALL if options.small else FULL
        for name in ("text", "held_out"):
            if getattr(options, name) is not None:
                print(f"the experiment fold generates its passkey texts: {name} is not used")

    def settings(self) -> dict[str, Any]:
        """The settings without the number of seeds: runs with more seeds resume."""
        return {
            "small": self.options.small, "recipe": RECIPE, "segment": SEGMENT, "segments": list(self.scale.segments),
            "depths": list(self.scale.depths), "prompts": self.scale.prompts, "steps": list(self.scale.other_steps),
        }  # fmt: skip

    def items(self) -> list[Trained]:
        return [Trained(arm, seed) for seed in self.seeds for arm in ARMS]

    def key(self, item: Trained) -> Key:
        return {"arm": item.arm.name, "seed": item.seed}

    def measure(self, item: Trained) -> Record:
        arm, folder = item.arm, self.output / "models" / f"fold-{item.arm.name}-{item.seed}"
        seconds = self._train(item, folder)
        model = CondenseForCausalLM.from_pretrained(folder / "trained").eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "trained")
        evaluated = EvaluatedModel(arm.name, str(folder / "trained"), model, tokenizer)
        block = model.model.layers[0]
        record = {
            "parameters": model.num_parameters(),
            "layer_parameters": sum(parameter.numel() for parameter in model.model.layers.parameters()),
            "training_s": seconds,
            "milestones": json.loads((folder / "trained" / "curriculum.json").read_text())["milestones"],
            "found": self._found(evaluated, self.scale.segments, item.seed),
            "alpha": block.alpha.item() if arm.flow else None,
            "found_with_steps": {},
        }
        for steps in self.scale.other_steps if arm.flow else ():
            set_solver(model, "euler", steps=steps)
            (found,) = self._found(evaluated, [min(FAR, self.scale.segments[-1])], item.seed)
            record["found_with_steps"][str(steps)] = found
        return record

    def _train(self, item: Trained, folder: Path) -> float | None:
        """Writes `folder`/trained unless it exists; returns the training's seconds, or None if it existed.

        A stopped run resumes from its last checkpoint.
        """
        arm, start = item.arm, folder / "start"
        if not (folder / "started").exists():  # not started, or killed while writing the start
            shutil.rmtree(folder, ignore_errors=True)
            save_small_llama(folder / "llama", item.seed, layers=arm.layers)
            model = CondenseForCausalLM.from_pretrained(folder / "llama", segment_length=SEGMENT)
            if arm.flow:
                convert_to_depth(model, 0, arm.layers, field="layer", control_size=0, **arm.flow)
            model.save_pretrained(start)
            PreTrainedTokenizerFast.from_pretrained(folder / "llama").save_pretrained(start)
            (folder / "started").touch()
        if was_finished(folder / "trained"):
            return None
        overrides = [f"model={start}", f"output={folder / 'trained'}", f"seed={item.seed}"]
        begun = time.perf_counter()
        if self.options.small:
            from condense.training.recipe import load_recipe
            from condense.training.train import train

            train(load_recipe(RECIPE, [*overrides, *SMALL_RUN]))
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
        cells = task.summarise(measure(task))["cells"]
        found = []
        for number in segments:
            of_length = [cell for cell in cells if cell["length"] == SEGMENT * number]
            counts = {name: sum(cell[name] for cell in of_length) for name in ("correct", "total")}
            found.append({"segments": number} | counts)
        return found

    def summarise(self, measured: Sequence[tuple[Trained, Record]]) -> dict[str, Any]:
        described = {arm.name: {"described": arm.described, "evaluations": arm.evaluations} for arm in ARMS}
        return {"arms": described} | super().summarise(measured)

    def rows(self, results: Results) -> list[dict[str, Any]]:
        """Returns a line per model, number of Euler steps (if not the trained one) and number of segments."""
        lines = []
        for record in results["records"]:
            named = {name: record[name] for name in ("arm", "seed", "parameters", "layer_parameters", "alpha")}
            trained = results["arms"][record["arm"]]["evaluations"]
            lines += [named | {"evaluations": trained} | found for found in record["found"]]
            lines += [
                named | {"evaluations": int(steps)} | found
                for steps, found in record["found_with_steps"].items()
                if int(steps) != trained
            ]
        return lines

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        columns = ["arm", "seeds", "evaluations", "parameters of the layers", "in all", "longest trained [segments]"]
        columns += [f"{number} segments: % found" for number in results["segments"]]
        rows, steps_rows = [], []
        for arm, own in _by_arm(results):
            first, reached = own.iloc[0], [milestones[-1][1] for milestones in own.milestones]
            row = [arm, len(own), results["arms"][first.arm]["evaluations"]]
            row += [f"{first.layer_parameters:,}", f"{first.parameters:,}", _span(reached)]
            rows.append(row + [_share(found) for found in zip(*own.found, strict=True)])
            if first.found_with_steps:
                alphas = ", ".join(f"{alpha:.2f}" for alpha in own.alpha)
                found = [_share([found[str(steps)] for found in own.found_with_steps]) for steps in results["steps"]]
                steps_rows.append([arm, alphas, *found])
        columns_of_steps = ["arm", "alpha after training", *(f"{steps} steps: % found" for steps in results["steps"])]
        read_with = (
            f"trained flows read with other numbers of Euler steps, {min(FAR, results['segments'][-1])} segments"
        )
        return [
            Table("passkeys found, all depths of the key together, by seed", columns, rows),
            Table(read_with, columns_of_steps, steps_rows),
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
