"""Measures time and peak memory of variants of models in turn."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from condense.eval.benchmark.cases import BenchmarkCase, ModelVariant
from condense.eval.benchmark.models import configure, parameter_bytes
from condense.eval.benchmark.timing import Contender, free_memory, measure_in_turn, sample, summarize
from condense.eval.benchmark.workloads import WHOLE_TEXT_WORKLOADS, random_ids
from condense.execution.selection import CAPTURING_DEVICES

from .session import Session, log


@dataclass(frozen=True)
class Entry:
    """A case of a comparison: `call` runs `model`, configured for `case`. `row` names the comparison in the results."""

    row: str
    case: BenchmarkCase
    model: Any
    call: Callable[[], object]
    state_bytes: int | None = None

    def point(self) -> dict[str, Any]:
        """Returns the fields of the result that are known before the measurement."""
        first = {"row": self.row, "mode": self.case.mode, "length": self.case.length, "batch": self.case.batch}
        held = {} if self.state_bytes is None else {"state_bytes": self.state_bytes}
        return first | held | asdict(self.case)


def compare_variants(
    session: Session,
    row: str,
    mode: str,
    models: dict[str, Any],
    variants: Sequence[ModelVariant],
    length: int,
    batch: int = 1,
    warm_ups: int = 1,
    in_a_row: int = 1,
) -> None:
    """Compares variants on a text of random tokens, and adds a point for each under the name `row`.

    A repeat makes `in_a_row` calls, like a training loop: while the device is busy with a call, the host prepares the
    next one. `seconds` is the time of one call.
    """
    entries = []
    for variant in variants:
        model = models[variant.kind]
        case = BenchmarkCase(**asdict(variant), mode=mode, length=length, batch=batch)
        call = WHOLE_TEXT_WORKLOADS[mode](model, random_ids(model, batch, length))
        entries.append(Entry(row, case, model, call))
    compare(session, entries, session.sizes.repeats, warm_ups, in_a_row)


def compare(session: Session, entries: Sequence[Entry], repeats: int, warm_ups: int = 1, in_a_row: int = 1) -> None:
    """Measures the entries in turn and adds their points.

    - `first_seconds`: the time of the first repeat, which may load kernels and capture a graph.
    - `seconds`: the median of the repeats.
    - `peak_bytes`: the peak during the repeats, on CUDA without what other entries hold; absent for graphs.
    - `before_bytes`: the model's own memory.
    - `out_of_memory`: whether the entry did not fit into memory.
    """
    free_memory()
    contenders = [
        Contender(entry.model, partial(_repeat, entry.call, in_a_row), partial(configure, entry.model, entry.case))
        for entry in entries
    ]
    firsts = [sample(contender, session.memory) for contender in contenders]
    fitting = [contender for contender, first in zip(contenders, firsts, strict=True) if first is not None]
    measured = iter(measure_in_turn(fitting, session.memory, repeats, warm_ups - 1, partial(_has_time, session)))
    for entry, first in zip(entries, firsts, strict=True):
        samples = [] if first is None else next(measured)
        point = entry.point() | {
            "part": session.part,
            "hidden_size": entry.model.config.hidden_size,
            "layers": entry.model.config.num_hidden_layers,
            "out_of_memory": not samples,
            "memory_is": session.memory.description,
            "before_bytes": parameter_bytes(entry.model),
        }
        if first is not None and samples:
            point |= {"first_seconds": first.seconds, **summarize([one.seconds / in_a_row for one in samples])}
            point |= {} if in_a_row == 1 else {"in_a_row": in_a_row}
            if not _is_replayed(entry):
                point["peak_bytes"] = max(one.peak_bytes for one in samples)
        session.points.append(point)
        log(f"  {describe(point)}")


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _is_replayed(entry: Entry) -> bool:
    """Whether an entry replays a graph. A graph holds its memory between calls, and the allocator's peak does not count
    what a replay uses of it."""
    case, device = entry.case, entry.model.device.type
    by_default = case.schedule == "auto" and case.mode == "training" and device in CAPTURING_DEVICES
    return case.schedule == "graph" or case.fixed_decoding or by_default


def _has_time(session: Session, seconds_of_a_repeat: float) -> bool:
    if session.seconds_left() >= 2 * seconds_of_a_repeat:
        return True
    log("  fewer repeats: the time is nearly over")
    return False


def describe(point: dict[str, Any]) -> str:
    """Returns one line for the terminal."""
    name = f"{point['row']}, {point['length']:,} tokens: {variant_name(point)}"
    if point["out_of_memory"]:
        return f"{name}: OOM"
    state = f", state {point['state_bytes'] / 2**20:,.1f} MiB" if "state_bytes" in point else ""
    peak = f", peak {point['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in point else ""
    return f"{name}: {1000 * point['seconds']:,.2f} ms{peak}{state}"


def variant_name(point: dict[str, Any]) -> str:
    words = [point["kind"], point["attention"]]
    if point["kind"] == "folded":
        words += [f"segment {point['segment_length']}", str(point["schedule"])]
    if point["checkpointing"]:
        groups = point.get("checkpoint_segments", 1)
        words.append("checkpointing" + (f" by {groups} segments" if groups > 1 else ""))
    return " ".join(words)
