"""Memory and time against length: folded, stock and sliding-window models of one shape (table I, figures 5 to 7)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from condense.checks import check_attention, check_dtype
from condense.configuration import OWN_ATTENTION
from condense.training.allocator import record_history, write_snapshot
from condense.training.planning.devices import peak_flops
from condense.training.planning.operations import text_flops

from ..models import state_bytes
from ..results import hardware
from . import profile_tables
from .cases import MODES, BenchmarkCase, Environment, device_and_dtype
from .grid import DEFAULTS, TABLE_1, GridTask, axes, grid, key_of, run_grid
from .memory import is_out_of_memory, memory_of
from .models import MODEL_KINDS, TABLE_1_PARAMETERS, build_model, set_checkpointing, shape_of
from .options import DEFAULT_KINDS, ProfileOptions
from .timing import seconds_of, summarize
from .workloads import adamw, decoding_step, prefill, random_ids, read_context, training_step

NEW_TOKENS = 32
WARM_UP_TOKENS = 4
TOKENS_PER_CALL = 2048  # of a context that is read before decoding


class Profile(GridTask):
    kind = "profile"

    @classmethod
    def tables(cls, results):
        return profile_tables.tables(results)

    @classmethod
    def draw(cls, results, path):
        profile_tables.draw(results, path)


def profile(output: Path, options: ProfileOptions) -> dict[str, Any]:
    """Measures every combination and writes output/profile.*.

    A profile that was stopped resumes when it is called again with the same options. Raises `ValueError` for options
    that cannot be measured.
    """
    chosen = axes(options, TABLE_1 if options.shape == "table1" else DEFAULTS)
    check(options, chosen)
    shape = shape_of(options.shape, options.vocab_size)
    snapshots = str(output / "snapshots") if options.snapshots else None
    environment = Environment(shape, options.dtype, options.repeats, snapshots)
    cases = list(grid(options.kinds or DEFAULT_KINDS, **chosen, checkpointing=options.checkpointing))
    results = run_grid(Profile, output, cases, measure, environment)
    if options.shape == "table1" and options.vocab_size is None:
        assert {point["parameters"] for point in results["points"]} <= {TABLE_1_PARAMETERS, None}
    return results


def check(options: ProfileOptions, chosen: dict[str, Sequence[Any]]) -> None:
    """Raises `ValueError` for options that cannot be measured."""
    kinds = options.kinds or DEFAULT_KINDS
    for items, known, name in ((kinds, MODEL_KINDS, "kinds"), (chosen["modes"], MODES, "modes")):
        if wrong := [item for item in items if item not in known]:
            raise ValueError(f"{name}={wrong}: choose from {', '.join(known)}.")
    check_dtype(options.dtype)
    for name in chosen["attentions"]:
        check_attention(name)
        if name in OWN_ATTENTION and name != "auto" and set(kinds) - {"folded"}:
            raise ValueError(f"attentions={[name]}: only kind folded has it; leave it out, or the other kinds.")
    if options.snapshots and not torch.cuda.is_available():
        raise ValueError("snapshots are the CUDA allocator's, and there is no GPU: leave them out.")


def measure(case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """Seconds (median, lowest and highest of the repeats; per token in decoding) and bytes, in this process.

    `peak_bytes` is the peak of the whole measurement, warm-up included. `before_bytes` is the memory of the process or
    of the allocator with the model loaded and before its first forward pass. A case that does not fit into memory has
    `out_of_memory`. On a GPU there are also `reserved_bytes` and `allocation_retries`, and for training `mfu`.
    """
    device, dtype = device_and_dtype(environment.dtype)
    memory = memory_of(device)
    figures: dict[str, Any] = {"memory_is": memory.description, "dtype": dtype, "out_of_memory": False}
    torch.manual_seed(0)
    model = build_model(case.kind, environment.shape, case.segment_length, case.attention)
    figures["parameters"] = model.num_parameters()
    if environment.snapshots:
        record_history()
    try:
        model = model.to(device, getattr(torch, dtype))
        figures["before_bytes"] = memory.now()
        memory.restart()
        figures |= MEASUREMENTS[case.mode](model, case, environment.repeats)
        figures["peak_bytes"] = memory.peak()
        figures |= memory.allocator() | utilization(case, environment.shape, dtype, figures["seconds"])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        figures["out_of_memory"] = True
    if environment.snapshots:
        name = "-".join(str(value) for value in key_of(case).values())
        write_snapshot(Path(environment.snapshots) / f"{name}.pickle")
    return figures


def utilization(case: BenchmarkCase, shape: dict[str, Any], dtype: str, seconds: float) -> dict[str, float]:
    """`mfu`: the share of the GPU's peak that a training step's own operations reach. Empty where that is not known."""
    peak = peak_flops(hardware())
    if peak is None or dtype != "bfloat16" or case.mode != "training" or case.kind == "sliding_window":
        return {}
    flops = case.batch * text_flops(LlamaConfig(**shape), case.segment_length)(case.length)
    return {"mfu": flops / seconds / peak}


def _training(model: Any, case: BenchmarkCase, repeats: int) -> dict[str, Any]:
    if case.checkpointing:
        set_checkpointing(model, True)
    optimizer = adamw(model) if case.optimizer else None
    step = training_step(model, random_ids(model, case.batch, case.length), optimizer)
    step()
    return summarize([seconds_of(step) for _ in range(repeats)])


def _prefill(model: Any, case: BenchmarkCase, repeats: int) -> dict[str, Any]:
    call = prefill(model, random_ids(model, case.batch, case.length))
    held = state_bytes(call())
    return summarize([seconds_of(call) for _ in range(repeats)]) | {"state_bytes": held}


def _decoding(model: Any, case: BenchmarkCase, repeats: int) -> dict[str, Any]:
    """New tokens after a context of `length` tokens, one at a time: each token is a repeat."""
    context_BN = random_ids(model, case.batch, case.length)
    cache, next_B1 = read_context(model, context_BN, TOKENS_PER_CALL)
    step = decoding_step(model, cache, next_B1)
    for _ in range(WARM_UP_TOKENS):
        step()
    return summarize([seconds_of(step) for _ in range(repeats * NEW_TOKENS)]) | {"state_bytes": state_bytes(cache)}


MEASUREMENTS: dict[str, Callable[[Any, BenchmarkCase, int], dict[str, Any]]] = {
    "training": _training,
    "prefill": _prefill,
    "decoding": _decoding,
}
