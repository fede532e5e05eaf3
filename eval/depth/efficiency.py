"""The cost of a flow compared with layers: inference and training time, memory, and the adjoint's gradient error.

The paper's table 3, plus the discrete twins, the model without the replaced layers, and a count of operations.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from condense.depth import set_solver
from condense.progress import ProgressBar

from ..results import Table, picture
from ..results_store import Record
from .experiment import Experiment
from .lines import finish, groups, table
from .models import TWIN_STEPS, Size, block_in, block_of
from .pretraining import held_out_windows, trained

FIXED = (("euler", 1), ("euler", 2), ("euler", 4), ("euler", 8), ("midpoint", 4), ("rk4", 4))
ADAPTIVE = tuple((solver, tolerance) for solver in ("dopri5", "adaptive_heun") for tolerance in (1e-2, 1e-3, 1e-5))
TRAINED = ("baseline", "hybrid", "twin", "wide_twin", "shorter")
STEPS = (4, 16, 64, 256)
REFERENCE = ("rk4", 256)
GRADIENT_TOKENS = 16
REPEATS, SMALL_REPEATS = 10, 2
MEGABYTE = 2**20
PAPER_ROWS: list[list[Any]] = [
    ["paper: baseline", "-", "-", "519.83", "1.00", "-", "-", "-", "-"],
    ["paper: hybrid", "4", "4", "507.19", "0.98", "-", "-", "-", "-"],
]

Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]  # by name: a call's preparation, and the call


class Part(NamedTuple):
    part: str
    seed: int


class Contender(NamedTuple):
    """A model, and the solver settings applied before each call."""

    arm: str
    model: GPT2LMHeadModel
    solver: dict[str, Any]


class Efficiency(Experiment[Part]):
    kind = "depth_efficiency"
    unit = "part"
    about = (
        "Models take turns, repeat by repeat, in one process; ratios are those of one repeat, and their median stands "
        "in the tables with the lowest and the highest. Predicted ratios count multiplications and additions of "
        "matrices alone, and for an adaptive solver the evaluations of the slowest token, since a batch goes on until "
        "it ends. Memory is what autograd keeps for the backward pass, weights aside. The adjoint's gradient is "
        "that of the continuous problem; its error is relative to the gradient through the solver, over all weights "
        f"of the block, in float64 for 1 x {GRADIENT_TOKENS} tokens."
    )

    def items(self) -> list[Part]:
        return [Part(part, seed) for seed in self.seeds for part in ("inference", "training", "adjoint")]

    def measure(self, item: Part) -> Record:
        models = {arm: trained(arm, item.seed, self.setup, self.output) for arm in TRAINED}
        ids_BN = held_out_windows(self.setup)[: self.size.batch]
        repeats = SMALL_REPEATS if self.options.small else REPEATS
        if item.part == "inference":
            return measure_inference(models, ids_BN, self.size, repeats)
        if item.part == "training":
            return measure_training(models, ids_BN, self.size, repeats)
        return measure_adjoint(models["hybrid"], ids_BN)

    def summarise(self, measured: Sequence[tuple[Part, Record]]) -> dict[str, Any]:
        records = [item._asdict() | {"measured": record} for item, record in measured]
        return {"threads": torch.get_num_threads(), "records": records}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"seed": record["seed"], "part": record["part"], "name": name, "repeat": repeat, "seconds": seconds}
            | {"evaluations": found.get("evaluations"), "saved_bytes": found.get("saved_bytes")}
            for record in results["records"]
            if record["part"] != "adjoint"
            for name, found in record["measured"].items()
            for repeat, seconds in enumerate(found["seconds"])
        ]

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        size = results["size"]
        batch = f"{size['batch']} x {size['positions']} tokens, {results['threads']} threads: median [lowest, highest]"
        return [
            _inference(_repeats(results, "inference"), f"inference, {batch}"),
            _training(_repeats(results, "training"), f"training step with AdamW, {batch}"),
            _adjoint(_adjoint_means(results)),
        ]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        by_name, adjoint = _repeats(results, "inference").groupby("name", sort=False), _adjoint_means(results)
        milliseconds = 1000 * by_name.body_seconds.median()
        predicted = milliseconds["baseline"] * by_name.body_predicted.agg(fmean)
        with picture(path, columns=3, figsize=(13, 3.8)) as (left, middle, right):
            left.barh(milliseconds.index, milliseconds, height=0.6, color="C0")
            left.plot(predicted, predicted.index, "k|", ms=9, label="predicted from the baseline")
            left.invert_yaxis()
            left.tick_params(axis="y", labelsize=7)
            for gradient in ("direct", "adjoint"):
                middle.plot(STEPS, adjoint[f"{gradient}_bytes"] / MEGABYTE, "o-", label=gradient)
                right.plot(STEPS, adjoint[f"{gradient}_to_reference"], "o-", label=gradient)
            right.plot(STEPS, adjoint.adjoint_to_direct, "o--", label="adjoint to direct")
            for axes in (middle, right):
                axes.set_xscale("log", base=2)
            finish(left, "ms a batch, without the head", "")
            finish(middle, "Euler steps", "MiB kept for the backward pass", log="y")
            finish(right, "Euler steps", "relative error of the gradient", log="y")


def operations(arm: str, size: Size, evaluations: float) -> float:
    """Counts one token's multiply-adds in all matrix products except the head's.

    Attention counts as if every token saw the whole window. The control, multiplied once per text, is not counted.
    """
    num_layers = size.layers - (0 if arm == "baseline" else size.replaced[1] - size.replaced[0])
    layer = 12 * size.width**2 + 2 * size.positions * size.width
    return num_layers * layer + evaluations * 2 * size.width * size.field_size


def head_operations(size: Size) -> int:
    return size.width * size.vocab_size


def in_turn(calls: Calls, repeats: int) -> dict[str, list[float]]:
    """Times the calls in turn, in seconds; preparation and the first round are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in ProgressBar(range(repeats + 1), desc="in turn", unit="round", leave=False):
        for name, (prepare, call) in calls.items():
            prepare()
            start = time.perf_counter()
            call()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def contenders(models: dict[str, GPT2LMHeadModel]) -> dict[str, Contender]:
    fixed: list[dict[str, Any]] = [{"solver": solver, "steps": steps} for solver, steps in FIXED]
    adaptive = [{"solver": solver, "rtol": tolerance, "atol": tolerance / 10} for solver, tolerance in ADAPTIVE]
    found = {arm: Contender(arm, models[arm], {}) for arm in TRAINED if arm != "hybrid"}
    for (solver, amount), settings in zip((*FIXED, *ADAPTIVE), fixed + adaptive, strict=True):
        found[f"hybrid, {solver} {amount:g}"] = Contender("hybrid", models["hybrid"], settings)
    return found


@torch.no_grad()
def measure_inference(models: dict[str, GPT2LMHeadModel], ids_BN: torch.Tensor, size: Size, repeats: int) -> Record:
    """Measures seconds with and without the head, evaluations, and predicted ratios."""
    found: Record = {}
    calls: Calls = {}
    for name, contender in contenders(models).items():
        model, prepare = contender.model, partial(_prepare, contender)
        calls[name] = (prepare, partial(model, ids_BN))
        calls[f"{name} body"] = (prepare, partial(model.transformer, ids_BN))
        prepare()
        model.transformer(ids_BN)
        mean, most = _evaluations(model)
        # One evaluation of the twin has a quarter of the weights of the hybrid's.
        whole_evaluations = most / TWIN_STEPS if contender.arm == "twin" else most
        counted = operations(contender.arm, size, whole_evaluations)
        baseline, head = operations("baseline", size, 0), head_operations(size)
        found[name] = {
            "evaluations": mean,
            "most_evaluations": most,
            "predicted": (counted + head) / (baseline + head),
            "body_predicted": counted / baseline,
        }
    seconds = in_turn(calls, repeats)
    set_solver(models["hybrid"], "euler", steps=4)
    return {
        name: record | {"seconds": seconds[name], "body_seconds": seconds[f"{name} body"]}
        for name, record in found.items()
    }


def _prepare(contender: Contender) -> None:
    if contender.solver:
        set_solver(contender.model, **contender.solver)


def _evaluations(model: nn.Module) -> tuple[float, float]:
    """Returns the last call's evaluations: the mean over tokens and the maximum."""
    block = block_of(model)
    if block is None:
        return 0.0, 0.0
    number = torch.as_tensor(block.function_evaluations, dtype=torch.float32)
    return number.mean().item(), number.max().item()


def measure_training(models: dict[str, GPT2LMHeadModel], ids_BN: torch.Tensor, size: Size, repeats: int) -> Record:
    """Measures seconds of a training step and the bytes kept for its backward pass. Changes the models' weights."""
    calls: Calls = {}
    found: Record = {}
    for name in ("baseline", "hybrid", "hybrid, adjoint", "twin", "wide_twin", "shorter"):
        arm, _, gradient = name.partition(", ")
        model = models[arm]
        solver = {} if block_of(model) is None else {"solver": "euler", "gradient": gradient or "direct"}
        prepare = partial(_prepare, Contender(arm, model, solver))
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, fused=True)
        prepare()
        saved = saved_bytes(model, partial(_loss, model, ids_BN))
        calls[name] = (prepare, partial(_step, model, optimizer, ids_BN))
        found[name] = {"saved_bytes": saved, "predicted": _predicted_training(name, size)}
    seconds = in_turn(calls, repeats)
    return {name: record | {"seconds": seconds[name]} for name, record in found.items()}


def _loss(model: GPT2LMHeadModel, ids_BN: torch.Tensor) -> torch.Tensor:
    return model(ids_BN, labels=ids_BN).loss


def _step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, ids_BN: torch.Tensor) -> None:
    _loss(model, ids_BN).backward()
    optimizer.step()
    optimizer.zero_grad()


def _predicted_training(name: str, size: Size) -> float:
    """Returns the ratio to the baseline: a backward pass counts as two forward ones; the adjoint adds one."""
    arm = name.partition(",")[0]
    evaluations = {"hybrid": 4.0, "twin": 1.0, "wide_twin": 4.0}.get(arm, 0.0)
    head, baseline = head_operations(size), operations("baseline", size, 0)
    counted = 3 * (operations(arm, size, evaluations) + head)
    if "adjoint" in name:
        counted += operations(arm, size, evaluations) - operations(arm, size, 0)
    return counted / (3 * (baseline + head))


def saved_bytes(module: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Counts the bytes that autograd keeps from a forward pass, each storage once, without the module's weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive while counting, so that addresses stay unique

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def measure_adjoint(hybrid: GPT2LMHeadModel, ids_BN: torch.Tensor) -> Record:
    """Measures, by number of Euler steps, the block's bytes for one row and the gradient's relative errors."""
    block = block_in(hybrid)
    hidden_BND = torch.randn(1, ids_BN.shape[1], hybrid.config.n_embd, generator=torch.Generator().manual_seed(0))
    found: Record = {str(steps): {} for steps in STEPS}
    for steps in STEPS:
        for gradient in ("direct", "adjoint"):
            set_solver(hybrid, "euler", steps=steps, gradient=gradient)
            found[str(steps)][f"{gradient}_bytes"] = saved_bytes(block, partial(block, hidden_BND))
    hybrid.double()
    ids_1N = ids_BN[:1, :GRADIENT_TOKENS]
    reference = _gradient(hybrid, ids_1N, *REFERENCE, "direct")
    for steps in STEPS:
        direct, adjoint = (_gradient(hybrid, ids_1N, "euler", steps, name) for name in ("direct", "adjoint"))
        found[str(steps)] |= {
            "adjoint_to_direct": _relative(adjoint, direct),
            "adjoint_to_reference": _relative(adjoint, reference),
            "direct_to_reference": _relative(direct, reference),
        }
    hybrid.float()
    set_solver(hybrid, "euler", steps=4, gradient="direct")
    return found


def _gradient(model: GPT2LMHeadModel, ids_BN: torch.Tensor, solver: str, steps: int, gradient: str) -> torch.Tensor:
    """Returns the gradient of the model's loss for all weights of the block, as one vector."""
    set_solver(model, solver, steps=steps, gradient=gradient)
    found = torch.autograd.grad(_loss(model, ids_BN), list(block_in(model).parameters()))
    return torch.cat([part.flatten() for part in found])


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def _repeats(results: dict[str, Any], part: str) -> pd.DataFrame:
    """Returns a line per seed, name and repeat, with times as ratios to the baseline of the same repeat."""
    times = {"inference": ["seconds", "body_seconds"], "training": ["seconds"]}[part]
    runs = [
        {"name": name} | found | {f"{time}_ratio": np.divide(found[time], measured["baseline"][time]) for time in times}
        for measured in (record["measured"] for record in results["records"] if record["part"] == part)
        for name, found in measured.items()
    ]
    return pd.DataFrame(runs).explode([*times, *(f"{time}_ratio" for time in times)])


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):,.{digits}f} [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"


def _inference(lines: pd.DataFrame, title: str) -> Table:
    rows = [
        {
            "model": name,
            "evaluations of a token, mean": f"{fmean(own.evaluations):.1f}" if any(own.evaluations) else "-",
            "most": f"{max(own.most_evaluations):.0f}" if any(own.evaluations) else "-",
            "ms a batch": _spread(1000 * own.seconds, 1),
            "against the baseline": _spread(own.seconds_ratio, 2),
            "predicted": f"{fmean(own.predicted):.2f}",
            "ms without the head": _spread(1000 * own.body_seconds, 1),
            "against the baseline's": _spread(own.body_seconds_ratio, 2),
            "predicted without the head": f"{fmean(own.body_predicted):.2f}",
        }
        for name, own in groups(lines, "name")
    ]
    return table(title, rows, PAPER_ROWS)


def _training(lines: pd.DataFrame, title: str) -> Table:
    rows = [
        {
            "model": name,
            "ms a step": _spread(1000 * own.seconds, 1),
            "against the baseline": _spread(own.seconds_ratio, 2),
            "predicted": f"{fmean(own.predicted):.2f}",
            "MiB kept for the backward pass": f"{fmean(own.saved_bytes) / MEGABYTE:,.1f}",
        }
        for name, own in groups(lines, "name")
    ]
    return table(title, rows)


def _adjoint_means(results: dict[str, Any]) -> pd.DataFrame:
    """Returns the figures by number of steps, means over seeds."""
    parts = [pd.DataFrame(record["measured"]).T for record in results["records"] if record["part"] == "adjoint"]
    return pd.concat(parts).groupby(level=0, sort=False).agg(fmean)


def _adjoint(means: pd.DataFrame) -> Table:
    rows = [
        {
            "steps": steps,
            "MiB kept, direct": f"{found.direct_bytes / MEGABYTE:,.2f}",
            "adjoint": f"{found.adjoint_bytes / MEGABYTE:,.2f}",
            "adjoint's gradient against the direct one": f"{found.adjoint_to_direct:.2e}",
            "against rk4 with 256 steps": f"{found.adjoint_to_reference:.2e}",
            "direct against rk4 with 256 steps": f"{found.direct_to_reference:.2e}",
        }
        for steps, found in zip(STEPS, means.itertuples(), strict=True)
    ]
    return table("the adjoint: memory of the block, and error of its gradient (Euler)", rows)
