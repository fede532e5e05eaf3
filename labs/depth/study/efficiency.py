"""Measures the cost of a flow and of layers: inference and training time, memory, and the adjoint's gradient error.

Repeats the paper's table 3, with the discrete twins, the model without the replaced layers, and a count of operations.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from condense.eval.results import Table, picture
from condense.eval.results_store import Record
from condense.utils.progress import ProgressBar

from ..model import set_solver
from ..model.settings import ADAPTIVE_SOLVERS
from .experiment import Experiment
from .lines import finish, groups, table
from .models import TWIN_STEPS, Size, block_in, block_of
from .pretraining import held_out_windows, pretrain

TRAINED = ("baseline", "hybrid", "twin", "wide_twin", "shorter")
STEPS = (4, 16, 64, 256)
REFERENCE = ("rk4", 256)


class Contender(NamedTuple):
    arm: str
    solver: dict[str, Any] = {}


INFERENCE = {
    **{arm: Contender(arm) for arm in TRAINED if arm != "hybrid"},
    **{
        f"hybrid, {solver} {steps}": Contender("hybrid", {"solver": solver, "steps": steps})
        for solver, steps in (("euler", 1), ("euler", 2), ("euler", 4), ("euler", 8), ("midpoint", 4), ("rk4", 4))
    },
    **{
        f"hybrid, {solver} {tolerance:g}": Contender(
            "hybrid", {"solver": solver, "rtol": tolerance, "atol": tolerance / 10}
        )
        for solver, tolerance in product(ADAPTIVE_SOLVERS, (1e-2, 1e-3, 1e-5))
    },
}
DIRECT, ADJOINT = ({"solver": "euler", "gradient": gradient} for gradient in ("direct", "adjoint"))
TRAINING = {
    "baseline": Contender("baseline"),
    "hybrid": Contender("hybrid", DIRECT),
    "hybrid, adjoint": Contender("hybrid", ADJOINT),
    **{arm: Contender(arm) for arm in ("twin", "wide_twin", "shorter")},
}
GRADIENT_TOKENS = 16
REPEATS, SMALL_REPEATS = 10, 2
MEGABYTE = 2**20
PAPER_ROWS = [
    {"model": "paper: baseline", "ms a batch": "519.83", "against the baseline": "1.00"},
    {"model": "paper: hybrid", "evaluations of a token, mean": "4", "most": "4", "ms a batch": "507.19",
     "against the baseline": "0.98"},
]  # fmt: skip

Models = dict[str, GPT2LMHeadModel]
Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]  # by name: a call's preparation, and the call


class Part(NamedTuple):
    part: str
    seed: int


class Efficiency(Experiment[Part]):
    kind = "depth_efficiency"
    unit = "part"
    about = (
        "Models take turns, repeat by repeat, in one process. A ratio compares times of one repeat. Predicted ratios "
        "count only multiplications and additions of matrices, for an adaptive solver with the evaluations of the "
        "slowest token, since a batch goes on until it ends. Memory is what autograd keeps for the backward pass, "
        "without weights. The adjoint's gradient belongs to the continuous problem; its error is relative to the "
        f"gradient through the solver, over all weights of the block, in float64 for 1 x {GRADIENT_TOKENS} tokens."
    )

    def items(self) -> list[Part]:
        return [Part(part, seed) for seed in self.seeds for part in ("inference", "training", "adjoint")]

    def measure(self, item: Part) -> Record:
        models = {arm: pretrain(arm, item.seed, self.setup, self.output) for arm in TRAINED}
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
    # One evaluation of the twin has a quarter of the weights of the hybrid's.
    whole_evaluations = evaluations / TWIN_STEPS if arm == "twin" else evaluations
    return num_layers * layer + whole_evaluations * 2 * size.width * size.field_size


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


@torch.no_grad()
def measure_inference(models: Models, ids_BN: torch.Tensor, size: Size, repeats: int) -> Record:
    """Measures seconds with and without the head, evaluations, and predicted ratios."""
    found, calls, baseline, head = Record(), Calls(), operations("baseline", size, 0), head_operations(size)
    for name, (arm, solver) in INFERENCE.items():
        model, prepare = models[arm], partial(_prepare, models[arm], solver)
        calls[name] = (prepare, partial(model, ids_BN))
        calls[f"{name} body"] = (prepare, partial(model.transformer, ids_BN))
        prepare()
        model.transformer(ids_BN)
        block = block_of(model)
        evaluations = torch.as_tensor(0 if block is None else block.function_evaluations, dtype=torch.float32)
        counted = operations(arm, size, evaluations.max().item())
        found[name] = {
            "evaluations": evaluations.mean().item(),
            "most_evaluations": evaluations.max().item(),
            "predicted": (counted + head) / (baseline + head),
            "body_predicted": counted / baseline,
        }
    seconds = in_turn(calls, repeats)
    set_solver(models["hybrid"], "euler", steps=4)
    return {
        name: record | {"seconds": seconds[name], "body_seconds": seconds[f"{name} body"]}
        for name, record in found.items()
    }


def _prepare(model: GPT2LMHeadModel, solver: dict[str, Any]) -> None:
    if solver:
        set_solver(model, **solver)


def measure_training(models: Models, ids_BN: torch.Tensor, size: Size, repeats: int) -> Record:
    """Measures seconds of a training step and the bytes kept for its backward pass. Changes the models' weights."""
    found, calls = Record(), Calls()
    for name, (arm, solver) in TRAINING.items():
        model = models[arm]
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, fused=True)
        calls[name] = (partial(_prepare, model, solver), partial(_step, model, optimizer, ids_BN))
        _prepare(model, solver)
        saved = saved_bytes(model, partial(_loss, model, ids_BN))
        found[name] = {"saved_bytes": saved, "predicted": _predicted_training(arm, solver, size)}
    seconds = in_turn(calls, repeats)
    return {name: record | {"seconds": seconds[name]} for name, record in found.items()}


def _loss(model: GPT2LMHeadModel, ids_BN: torch.Tensor) -> torch.Tensor:
    return model(ids_BN, labels=ids_BN).loss


def _step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, ids_BN: torch.Tensor) -> None:
    _loss(model, ids_BN).backward()
    optimizer.step()
    optimizer.zero_grad()


def _predicted_training(arm: str, solver: dict[str, Any], size: Size) -> float:
    """Returns the ratio to the baseline: a backward pass counts as two forward ones; the adjoint adds one."""
    head, baseline, without = head_operations(size), operations("baseline", size, 0), operations(arm, size, 0)
    body = without if arm in ("baseline", "shorter") else operations(arm, size, TWIN_STEPS)
    counted = 3 * (body + head) + (body - without if solver == ADJOINT else 0)
    return counted / (3 * (baseline + head))


def saved_bytes(module: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Counts the bytes that autograd keeps from a forward pass, each storage once, without the module's weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive while counting, so addresses stay unique

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
    for steps, gradient in product(STEPS, ("direct", "adjoint")):
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
    rows: list[dict[str, Any]] = [*PAPER_ROWS]
    for name, own in groups(lines, "name"):
        has_block = any(own.evaluations)
        rows.append(
            {
                "model": name,
                "evaluations of a token, mean": f"{fmean(own.evaluations):.1f}" if has_block else "-",
                "most": f"{max(own.most_evaluations):.0f}" if has_block else "-",
                "ms a batch": _spread(1000 * own.seconds, 1),
                "against the baseline": _spread(own.seconds_ratio, 2),
                "predicted": f"{fmean(own.predicted):.2f}",
                "ms without the head": _spread(1000 * own.body_seconds, 1),
                "against the baseline's": _spread(own.body_seconds_ratio, 2),
                "predicted without the head": f"{fmean(own.body_predicted):.2f}",
            }
        )
    return table(title, rows)


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
