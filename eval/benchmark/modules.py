"""The memory of a training step by kind of tensor and by module, as torch's MemTracker counts tensors.

It counts what tensors hold, on any device: neither the allocator's reserve nor what a kernel needs while it runs.
Folded models run segment by segment here: in a wave, layers run as one stack, and no module of a layer is called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker, _ModMemStats, _ModState

from ..runner import Results
from . import module_tables
from .cases import BenchmarkCase, device_and_dtype
from .grid import DEFAULTS, TABLE_1, Environment, GridTask, axes, cases_of, run_grid
from .memory import is_out_of_memory, memory_of
from .models import set_checkpointing
from .options import ProfileOptions
from .profile import check
from .sources import build, read_models
from .workloads import adamw, random_ids, training_step

KINDS = {  # of tensors, by the names of MemTracker
    "PARAM": "parameters",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
    "TEMP": "temporary",
    "BUFFER": "buffers",
    "OTH": "inputs",
}


class Modules(GridTask):
    kind = "modules"

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """For each case a line with the bytes of each kind at the peak, and a line for each module."""
        found = []
        for point in results["points"]:
            key = {name: value for name, value in point.items() if not isinstance(value, dict | list)}
            found.append(key | {"module": "", **{f"peak_{kind}": size for kind, size in point.get("peak", {}).items()}})
            found += [key | module for module in point.get("modules", ())]
        return found

    @classmethod
    def tables(cls, results):
        return module_tables.tables(results)

    @classmethod
    def draw(cls, results, path):
        module_tables.draw(results, path)


def modules(output: Path, options: ProfileOptions) -> dict[str, Any]:
    """Measures a training step of every combination and writes output/modules.*.

    A measurement that was stopped resumes when it is called again with the same options. Raises `ValueError` for
    options that cannot be measured.
    """
    chosen = axes(options, (TABLE_1 if options.preset else DEFAULTS) | {"modes": ("training",)})
    if wrong := [mode for mode in chosen["modes"] if mode != "training"]:
        raise ValueError(f"modes={wrong}: a table by module is of a training step; leave --modes out.")
    models = read_models(options)
    check(options, chosen, models)
    environment = Environment(tuple(models), options.dtype, 1)
    return run_grid(Modules, output, cases_of(models, options, chosen), measure, environment)


def measure(case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """Bytes of the second step, in this process; a case that does not fit into memory has `out_of_memory`.

    `peak` and `after` hold the bytes by kind at the step's worst moment and at its end. `modules` holds for each module
    its `parameters`; `kept`, what its forward calls leave in memory, its outputs included; and `forward_peak` and
    `backward_peak`, the most that is in memory in all while the module runs.
    """
    device, dtype = device_and_dtype(environment.dtype)
    memory_of(device)  # on a CPU it limits the memory of this process
    torch.manual_seed(0)
    model = build(environment.model_of(case), case, dtype)
    figures: dict[str, Any] = {"parameters": model.num_parameters(), "dtype": dtype, "out_of_memory": False}
    if case.kind == "folded":
        model.config.schedule = "sequential"
    set_checkpointing(model, case.checkpointing)
    try:
        model = model.to(device, getattr(torch, dtype))
        return figures | track(model, random_ids(model, case.batch, case.length), case.optimizer)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return figures | {"out_of_memory": True}


def track(model: Any, ids_BN: torch.Tensor, with_optimizer: bool) -> dict[str, Any]:
    optimizer = adamw(model) if with_optimizer else None
    step = training_step(model, ids_BN, optimizer)
    step()  # makes the states of the optimizer
    model.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(model, ids_BN, *([optimizer] if optimizer else []))
    with tracker:
        step()
    device = ids_BN.device
    return {
        "peak": _by_kind(tracker.get_tracker_snapshot("peak")[device]),
        "after": _by_kind(tracker.get_tracker_snapshot()[device]),
        "modules": [_figures(stats, device) for stats in tracker.memory_tracking.values()],  # as they are called
    }


def _by_kind(snapshot: dict[Any, int]) -> dict[str, int]:
    return {name: snapshot[kind] for kind in snapshot if (name := KINDS.get(getattr(kind, "name", "")))} | {
        "total": snapshot["Total"]
    }


def _figures(stats: _ModMemStats, device: torch.device) -> dict[str, Any]:
    def totals(state: _ModState) -> list[int]:
        return [snapshot[device]["Total"] for snapshot in stats.snapshots.get(state, ())]

    before, after = totals(_ModState.PRE_FW), totals(_ModState.POST_FW)
    return {
        "module": stats.mod_fqn.partition(".")[2],
        "parameters": stats.parameter_mem,
        "kept": sum(after) - sum(before),
        "forward_peak": max(totals(_ModState.PEAK_FW)),
        "backward_peak": max(totals(_ModState.PEAK_BW), default=None),
    }
