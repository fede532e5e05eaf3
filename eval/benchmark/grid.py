"""A grid of cases, each measured in a process of its own: options, cases, and the run that resumes and writes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..results import hardware, run_metadata, versions, write_results
from ..results_store import open_results_store
from .cases import MODES, BenchmarkCase, Environment
from .process import ForkServer, ProcessKilledError

DEFAULTS: dict[str, Sequence[Any]] = {
    "modes": MODES,
    "lengths": (1024, 2048, 4096, 8192),
    "batches": (1,),
    "segments": (512,),
    "attentions": ("auto",),
}
# The grid of the paper: without and with FlashAttention, of which sdpa holds a kernel.
TABLE_1 = DEFAULTS | {
    "modes": ("training",),
    "lengths": (1024, 2048, 4096, 8192, 16384),
    "batches": (1, 4),
    "segments": (256, 512),
    "attentions": ("eager", "auto"),
}
KEY = ("kind", "mode", "length", "batch", "segment_length", "attention", "checkpointing")  # of a case, in its record


@dataclass(frozen=True)
class GridOptions:
    """The options of a grid.

    `shape` is `table1`, a folder or a hub id; `vocab_size` replaces the shape's own. `segments` are segment lengths.
    An axis that is None has the command's default. `dtype` "auto" is bfloat16 on CUDA, and float32 on a CPU.
    """

    shape: str = "table1"
    modes: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    batches: Sequence[int] | None = None
    segments: Sequence[int] | None = None
    attentions: Sequence[str] | None = None
    vocab_size: int | None = None
    dtype: str = "auto"
    repeats: int = 3


def axes(options: GridOptions, defaults: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
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
) -> Iterator[BenchmarkCase]:
    """Every combination. Kinds follow each other, so that models are compared at about the same time.

    A stock model has no segments, and only training has gradient checkpointing: cases that are equal are measured once.
    """
    seen = set()
    for mode, length, batch, attention, enabled, segment, kind in product(
        modes, lengths, batches, attentions, checkpointing, segments, kinds
    ):
        case = BenchmarkCase(
            kind=kind,
            mode=mode,
            length=length,
            batch=batch,
            segment_length=None if kind == "stock" else segment,
            attention=attention,
            checkpointing=enabled and mode == "training",
        )
        if case not in seen:
            seen.add(case)
            yield case


def key_of(case: BenchmarkCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in KEY}


def run_grid(
    name: str,
    output: Path,
    cases: Sequence[BenchmarkCase],
    measure: Callable[[BenchmarkCase, Environment], dict[str, Any]],
    environment: Environment,
    draw: Callable[[dict[str, Any], Path], None],
    **more_settings: Any,
) -> dict[str, Any]:
    """Measures the cases, writes output/NAME.* and returns the results. A stopped run resumes after its last case."""
    settings = {**asdict(environment), "hardware": hardware(), "torch": versions()["torch"], **more_settings}
    with open_results_store(output / f"{name}.records.jsonl", settings) as records, ForkServer(measure) as processes:
        points = []
        bar = tqdm(cases, unit="case", desc=name)
        for case in bar:
            bar.set_postfix_str(f"{case.kind} {case.mode} {case.length:,} segment {case.segment_length}")
            record = records.get(key_of(case), lambda case=case: in_a_process(processes, case, environment))
            points.append({**key_of(case), **record})
        results = {"kind": name, **run_metadata(), **settings, "points": points}
        write_results(output / name, results, points)
        draw(results, output / name)
    return results


def in_a_process(processes: ForkServer, case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """The figures of a case. A process that the system kills is out of memory, which is a result."""
    try:
        return processes.call(case, environment)
    except ProcessKilledError:
        return {"out_of_memory": True, "parameters": None}
