"""A grid of cases, each measured in a process of its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from ..results import hardware, versions
from ..runner import Task, run
from .cases import MODES, WITHOUT_SEGMENTS, BenchmarkCase, Environment
from .options import ProfileOptions
from .process import ForkServer, ProcessKilledError

DEFAULTS: dict[str, Sequence[Any]] = {
    "modes": MODES,
    "lengths": (1024, 2048, 4096, 8192),
    "batches": (1,),
    "segments": (512,),
    "attentions": ("auto",),
    "optimizer": (False,),
}
# The grid of the paper: without and with FlashAttention, of which sdpa holds a kernel.
TABLE_1 = DEFAULTS | {
    "modes": ("training",),
    "lengths": (1024, 2048, 4096, 8192, 16384),
    "batches": (1, 4),
    "segments": (256, 512),
    "attentions": ("eager", "auto"),
    "optimizer": (False, True),  # the paper trained; gpu_bench and earlier results are without
}
KEY = ("kind", "mode", "length", "batch", "segment_length", "attention", "checkpointing")  # of a case, in its record


def axes(options: ProfileOptions, defaults: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The axes of the grid: the options, or the defaults of those that are None."""
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
) -> Iterator[BenchmarkCase]:
    """Every combination. Kinds follow each other, so that models are compared at about the same time.

    A stock model has no segments, and only training has gradient checkpointing and an optimizer: cases that are equal
    are measured once.
    """
    seen = set()
    for mode, length, batch, attention, enabled, steps, segment, kind in product(
        modes, lengths, batches, attentions, checkpointing, optimizer, segments, kinds
    ):
        case = BenchmarkCase(
            kind=kind,
            mode=mode,
            length=length,
            batch=batch,
            segment_length=None if kind in WITHOUT_SEGMENTS else segment,
            attention=attention,
            checkpointing=enabled and mode == "training",
            optimizer=steps and mode == "training",
        )
        if case not in seen:
            seen.add(case)
            yield case


def key_of(case: BenchmarkCase) -> dict[str, Any]:
    """Without an optimizer the key is that of versions that had none, whose records stay valid."""
    return {name: getattr(case, name) for name in KEY} | ({"optimizer": True} if case.optimizer else {})


class GridTask(Task[BenchmarkCase]):
    """Cases, each measured in a process of its own, under settings that they share."""

    unit = "case"

    def __init__(
        self,
        cases: Sequence[BenchmarkCase],
        environment: Environment,
        processes: ForkServer,
        more_settings: dict[str, Any],
    ):
        self.cases, self.environment, self.processes, self.more = cases, environment, processes, more_settings

    def settings(self) -> dict[str, Any]:
        return {**asdict(self.environment), "hardware": hardware(), "torch": versions()["torch"], **self.more}

    def items(self) -> Sequence[BenchmarkCase]:
        return self.cases

    def key(self, item: BenchmarkCase) -> dict[str, Any]:
        return key_of(item)

    def measure(self, item: BenchmarkCase) -> dict[str, Any]:
        return in_a_process(self.processes, item, self.environment)

    def summarise(self, measured: Sequence[tuple[BenchmarkCase, dict[str, Any]]]) -> dict[str, Any]:
        return {"points": [{**key_of(case), "optimizer": case.optimizer, **record} for case, record in measured]}

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
    with ForkServer(measure) as processes:
        return run(task(cases, environment, processes, more_settings), output)


def in_a_process(processes: ForkServer, case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """The figures of a case. A process that the system kills is out of memory, which is a result."""
    try:
        return processes.call(case, environment)
    except ProcessKilledError:
        return {"out_of_memory": True, "parameters": None}
