"""A grid of cases, each measured in its own process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ..results import hardware, versions
from ..runner import Task, run
from .cases import MODES, WITHOUT_SEGMENTS, BenchmarkCase, device_and_dtype
from .memory import PeakMemory, memory_of
from .options import ProfileOptions
from .process import ProcessKilledError, call
from .sources import ProfiledModel, build
from .tables import MODE_NAMES, label, workload

DEFAULTS: dict[str, Sequence[Any]] = {
    "modes": MODES,
    "lengths": (1024, 2048, 4096, 8192),
    "batches": (1,),
    "segments": (512,),
    "attentions": ("auto",),
    "optimizer": (False,),
}
# The paper's grid: without and with FlashAttention, which sdpa includes.
TABLE_1 = DEFAULTS | {
    "modes": ("training",),
    "lengths": (1024, 2048, 4096, 8192, 16384),
    "batches": (1, 4),
    "segments": (256, 512),
    "attentions": ("eager", "auto"),
    "optimizer": (False, True),  # the paper trained with one; gpu_bench and earlier results have none
}
WORKLOAD = attrgetter("mode", "length", "batch", "attention", "checkpointing", "optimizer")  # a case, for any model
# A case, in its record.
KEY = ("model", "kind", "mode", "length", "batch", "segment_length", "attention", "checkpointing", "optimizer")


def axes(options: ProfileOptions, defaults: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Returns the axes of the grid: the options, or defaults for options that are None."""
    given = {name: getattr(options, name) for name in defaults}
    return {name: default if given[name] is None else given[name] for name, default in defaults.items()}


def grid(
    kinds: Sequence[str],
    modes: Sequence[str],
    lengths: Sequence[int],
    batches: Sequence[int],
    segments: Sequence[int],
    attentions: Sequence[str],
    checkpointing: Sequence[bool],
    optimizer: Sequence[bool] = (False,),
) -> list[BenchmarkCase]:
    """Returns every combination. Kinds follow each other, so models are compared at about the same time.

    A stock model has no segments, and only training has gradient checkpointing and an optimizer. Cases that become
    equal are measured once.
    """
    every = product(modes, lengths, batches, attentions, checkpointing, optimizer, segments, kinds)
    cases = [
        BenchmarkCase(
            kind=kind,
            mode=mode,
            length=length,
            batch=batch,
            segment_length=None if kind in WITHOUT_SEGMENTS else segment,
            attention=attention,
            checkpointing=enabled and mode == "training",
            optimizer=steps and mode == "training",
        )
        for mode, length, batch, attention, enabled, steps, segment, kind in every
    ]
    return list(dict.fromkeys(cases))


def cases_of(models: Sequence[ProfiledModel], options: ProfileOptions, chosen: dict[str, Sequence[Any]]) -> list[Any]:
    """Returns every model's grid. In each workload the models follow each other, to be measured close in time."""
    cases: list[BenchmarkCase] = []
    for model in models:
        own = chosen | {"segments": model.segments(chosen["segments"])}
        found = grid(model.kinds(options.kinds), **own, checkpointing=options.checkpointing)
        cases += [replace(case, model=model.name) for case in found]
    order = list(dict.fromkeys(map(WORKLOAD, cases)))
    return sorted(cases, key=lambda case: order.index(WORKLOAD(case)))


@dataclass(frozen=True)
class Environment:
    """The settings that all cases of a profile share.

    `snapshots` is a folder. `dtype` "auto" is bfloat16 on CUDA, and float32 on a CPU.
    """

    models: tuple[ProfiledModel, ...]
    dtype: str
    repeats: int
    snapshots: str | None = None

    def model_of(self, case: BenchmarkCase) -> ProfiledModel:
        (found,) = (model for model in self.models if model.name == case.model)
        return found


def key_of(case: BenchmarkCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in KEY}


class GridTask(Task[BenchmarkCase]):
    """Measures cases alike by `figures`, each in its own process."""

    unit = "case"

    def __init__(
        self,
        cases: Sequence[BenchmarkCase],
        environment: Environment,
        figures: Callable[[BenchmarkCase, Environment], dict[str, Any]],
        more: dict[str, Any],
    ):
        self.cases, self.environment, self.figures, self.more = cases, environment, figures, more

    def settings(self) -> dict[str, Any]:
        """Returns the settings without the models. They are in the keys, so a later start may add some."""
        of_all = {name: getattr(self.environment, name) for name in ("dtype", "repeats", "snapshots")}
        return {**of_all, "hardware": hardware(), "torch": versions()["torch"], **self.more}

    def items(self) -> Sequence[BenchmarkCase]:
        return self.cases

    def key(self, item: BenchmarkCase) -> dict[str, Any]:
        return key_of(item) | {"config": self.environment.model_of(item).fingerprint}

    def in_words(self, item: BenchmarkCase) -> str:
        return f"{self._label(item)}, {item.length:,} tokens, {workload(asdict(item), MODE_NAMES[item.mode])}"

    def measure(self, item: BenchmarkCase) -> dict[str, Any]:
        """Returns the figures of a case. If the system kills the process, the result is out of memory."""
        try:
            return call(self.figures, item, self.environment)
        except ProcessKilledError:
            return {"out_of_memory": True, "parameters": None}

    def summarise(self, measured: Sequence[tuple[BenchmarkCase, dict[str, Any]]]) -> dict[str, Any]:
        return {
            "models": [model.describe() for model in self.environment.models],
            "points": [{"label": self._label(case), **key_of(case), **record} for case, record in measured],
        }

    def _label(self, case: BenchmarkCase) -> str:
        """Returns the name of a case's model in tables and pictures: its own, or its kind if all have one shape."""
        model, as_kind = self.environment.model_of(case), label(key_of(case))
        if model.is_llama_shape:
            return f"{model.name} {as_kind}" if len(self.environment.models) > 1 else as_kind
        return f"{model.name}, segment {case.segment_length}" if case.kind == "folded" else model.name

    def rows(self, results: dict[str, Any]) -> Sequence[dict[str, Any]]:
        return results["points"]


def run_grid(
    task: type[GridTask],
    output: Path,
    cases: Sequence[BenchmarkCase],
    measure: Callable[[BenchmarkCase, Environment], dict[str, Any]],
    environment: Environment,
    **more_settings: Any,
) -> dict[str, Any]:
    """Runs the task with `measure` in child processes: see `condense.eval.runner.run`."""
    return run(task(cases, environment, measure, more_settings), output)


def prepare(case: BenchmarkCase, environment: Environment) -> tuple[Any, PeakMemory, str, str]:
    """Returns a case's model on the CPU, the memory, and the device and number format to measure with."""
    device, dtype = device_and_dtype(environment.dtype)
    memory = memory_of(device)  # on a CPU this limits the process's memory
    torch.manual_seed(0)
    return build(environment.model_of(case), case, dtype), memory, device, dtype
