"""Memory and time against length: folded, stock and sliding-window models of one shape (table I, figures 5 to 7), and
any other causal language models beside them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig

from condense.checks import check_attention, check_dtype
from condense.configuration import OWN_ATTENTION
from condense.training.allocator import record_history, write_snapshot
from condense.training.planning.devices import peak_flops
from condense.training.planning.operations import text_flops

from ..decode_state import state_bytes
from ..results import hardware
from . import profile_tables
from .cases import MODES, WITHOUT_SEGMENTS, BenchmarkCase
from .grid import DEFAULTS, TABLE_1, Environment, GridTask, axes, cases_of, key_of, prepare, run_grid
from .memory import PeakMemory, or_out_of_memory
from .models import MODEL_KINDS, TABLE_1_PARAMETERS, parameter_bytes, set_checkpointing
from .options import ProfileOptions
from .sources import ProfiledModel, check_models, fixed_positions, read_models
from .timing import seconds_of, summarize
from .workloads import adamw, decoding_step, prefill, random_ids, read_context, training_step

Result = TypeVar("Result")
NEW_TOKENS = 32
WARM_UP_TOKENS = 4
TOKENS_PER_CALL = 2048  # to read a context before decoding


class Profile(GridTask):
    kind = "profile"
    tables = staticmethod(profile_tables.tables)
    draw = staticmethod(profile_tables.draw)


def profile(output: Path, options: ProfileOptions) -> dict[str, Any]:
    """Measures every combination and writes output/profile.*.

    Call it again with the same options to resume a stopped profile. Raises `ValueError` for options that cannot be
    measured.
    """
    chosen = axes(options, TABLE_1 if options.preset else DEFAULTS)
    models = read_models(options)
    check(options, chosen, models)
    snapshots = str(output / "snapshots") if options.snapshots else None
    environment = Environment(tuple(models), options.dtype, options.repeats, snapshots)
    results = run_grid(Profile, output, cases_of(models, options, chosen), measure, environment)
    if options.preset and options.vocab_size is None:
        assert {point["parameters"] for point in results["points"]} <= {TABLE_1_PARAMETERS, None}
    return results


def check(options: ProfileOptions, chosen: dict[str, Sequence[Any]], models: Sequence[ProfiledModel]) -> None:
    """Raises `ValueError` for options that cannot be measured."""
    for items, known, name in ((options.kinds or (), MODEL_KINDS, "kinds"), (chosen["modes"], MODES, "modes")):
        if wrong := [item for item in items if item not in known]:
            raise ValueError(f"{name}={wrong}: choose from {', '.join(known)}.")
    kinds = {kind for model in models for kind in model.kinds(options.kinds)}
    check_dtype(options.dtype)
    for name in chosen["attentions"]:
        check_attention(name)
        if name in OWN_ATTENTION and name != "auto" and kinds - {"folded"}:
            raise ValueError(f"attentions={[name]}: only kind folded has it; leave it out, or the other kinds.")
    if options.snapshots and not torch.cuda.is_available():
        raise ValueError("snapshots come from the CUDA allocator, and there is no GPU: leave them out.")
    check_models(models, chosen["attentions"])


def measure(case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """Returns seconds (median, lowest and highest of the repeats; per token in decoding) and bytes, in this process.

    `peak_bytes` is the peak of the whole measurement and `later_peak_bytes` that after the first call, which moves
    weights once under some schedules. In decoding the first call reads the context. `before_bytes` is the memory of the
    process or the allocator with the model loaded, before its first call. A case that does not fit has `out_of_memory`.
    A GPU adds `reserved_bytes` and `allocation_retries`, and training there `mfu`.
    """
    model, memory, device, dtype = prepare(case, environment)
    figures: dict[str, Any] = {"memory_is": memory.description, "dtype": dtype, "out_of_memory": False}
    figures["parameters"] = model.num_parameters()
    num_new = WARM_UP_TOKENS + environment.repeats * NEW_TOKENS if case.mode == "decoding" else 0
    num_tokens = case.length + num_new
    if (limit := fixed_positions(model.config)) is not None and num_tokens > limit:
        return figures | {"not_measured": f"has {limit:,} positions"}
    if case.kind in WITHOUT_SEGMENTS and num_tokens > getattr(model.config, "max_position_embeddings", num_tokens):
        figures["past_positions"] = True
    if environment.snapshots:
        record_history()

    def measured() -> dict[str, Any]:
        placed = model.to(device, getattr(torch, dtype))
        figures.update(weight_bytes=parameter_bytes(placed), before_bytes=memory.now())
        peaks = Peaks(memory)
        found = MEASUREMENTS[case.mode](placed, case, environment.repeats, peaks)
        found |= peaks.figures() | memory.allocator()
        profiled = environment.model_of(case)
        is_llama = profiled.model_type == "llama"
        return found | (utilization(case, profiled.config, dtype, found["seconds"]) if is_llama else {})

    try:
        figures = or_out_of_memory(figures, measured)
    except NoStateError as error:
        return figures | {"not_measured": str(error)}
    if environment.snapshots:
        name = "-".join(str(value) for value in key_of(case).values())
        write_snapshot(Path(environment.snapshots) / f"{name}.pickle")
    return figures


class Peaks:
    """The memory's peaks in a measurement's first call and after it."""

    def __init__(self, memory: PeakMemory):
        self.memory, self.first_bytes = memory, 0
        memory.restart()

    def first(self, call: Callable[[], Result]) -> Result:
        """Returns the result of the first call, warm-ups included."""
        result = call()
        self.first_bytes = self.memory.peak()
        self.memory.restart()
        return result

    def figures(self) -> dict[str, int]:
        later_bytes = self.memory.peak()
        return {"peak_bytes": max(self.first_bytes, later_bytes), "later_peak_bytes": later_bytes}


class NoStateError(Exception):
    """Raised if the model returns no state, so later tokens can't be measured."""


def utilization(case: BenchmarkCase, shape: dict[str, Any], dtype: str, seconds: float) -> dict[str, float]:
    """Returns `mfu`, the share of the GPU's peak operations that a training step reaches; empty if unknown."""
    peak = peak_flops(hardware())
    if peak is None or dtype != "bfloat16" or case.mode != "training" or case.kind == "sliding_window":
        return {}
    flops = case.batch * text_flops(LlamaConfig(**shape), case.segment_length)(case.length)
    return {"mfu": flops / seconds / peak}


def _training(model: Any, case: BenchmarkCase, repeats: int, peaks: Peaks) -> dict[str, Any]:
    if case.checkpointing:
        set_checkpointing(model, True)
    optimizer = adamw(model) if case.optimizer else None
    step = training_step(model, random_ids(model, case.batch, case.length), optimizer)
    peaks.first(step)
    return summarize([seconds_of(step) for _ in range(repeats)])


def _prefill(model: Any, case: BenchmarkCase, repeats: int, peaks: Peaks) -> dict[str, Any]:
    call = prefill(model, random_ids(model, case.batch, case.length))
    held = peaks.first(lambda: state_bytes(_check(call())))
    return summarize([seconds_of(call) for _ in range(repeats)]) | {"state_bytes": held}


def _decoding(model: Any, case: BenchmarkCase, repeats: int, peaks: Peaks) -> dict[str, Any]:
    """Measures new tokens after a context of `length` tokens, one at a time; each token is a repeat."""
    context_BN = random_ids(model, case.batch, case.length)

    def start() -> tuple[dict[str, Any], Callable[[], None]]:
        state, next_B1 = read_context(model, context_BN, TOKENS_PER_CALL)
        step = decoding_step(model, _check(state), next_B1)
        for _ in range(WARM_UP_TOKENS):
            step()
        return state, step

    state, step = peaks.first(start)
    seconds = [seconds_of(step) for _ in range(repeats * NEW_TOKENS)]
    return summarize(seconds) | {"state_bytes": state_bytes(state)}


def _check(state: dict[str, Any]) -> dict[str, Any]:
    if not state:
        raise NoStateError("returns no state")
    return state


MEASUREMENTS: dict[str, Callable[[Any, BenchmarkCase, int, Peaks], dict[str, Any]]] = {
    "training": _training,
    "prefill": _prefill,
    "decoding": _decoding,
}
