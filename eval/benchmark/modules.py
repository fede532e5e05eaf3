"""The memory of a training step by kind of tensor and by module, as counted by torch's MemTracker.

It counts the bytes of tensors on any device, without the allocator's reserve or a kernel's temporary memory. Folded
models run segment by segment here: a wavefront runs layers as one stack and calls none of their modules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker, _ModMemStats, _ModState

from condense.loss import LossAccumulator

from ..runner import Results
from . import module_tables
from .cases import BenchmarkCase
from .grid import DEFAULTS, TABLE_1, Environment, GridTask, axes, cases_of, prepare, run_grid
from .memory import or_out_of_memory
from .models import ChunkedLossLlama, parameter_bytes, set_checkpointing
from .options import ProfileOptions
from .profile import check
from .sources import read_models
from .workloads import adamw, random_ids, training_step

HEAD = "lm_head"
COLUMNS = {  # for a module's figures
    "parameters": "module_weight_bytes",
    "kept": "module_kept_bytes",
    "forward_peak": "module_forward_peak_bytes",
    "backward_peak": "module_backward_peak_bytes",
}
KINDS = {  # of tensors, by MemTracker's names
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
    tables = staticmethod(module_tables.tables)
    draw = staticmethod(module_tables.draw)

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """Returns a record per case and module. The whole model's record also has the bytes by kind at the peak."""
        found = []
        for point in results["points"]:
            key = {name: value for name, value in point.items() if not isinstance(value, dict | list)}
            kinds = {f"{kind}_at_peak_bytes": size for kind, size in point.get("peak", {}).items()}
            for module in point.get("modules") or [{"module": ""}]:
                sizes = {column: module.get(name) for name, column in COLUMNS.items()}
                found.append(key | {"module": module["module"]} | sizes | (kinds if module["module"] == "" else {}))
        return found


def modules(output: Path, options: ProfileOptions) -> dict[str, Any]:
    """Measures a training step of every combination and writes output/modules.*.

    Call it again with the same options to resume a stopped measurement. Raises `ValueError` for options that cannot be
    measured.
    """
    chosen = axes(options, (TABLE_1 if options.preset else DEFAULTS) | {"modes": ("training",)})
    if wrong := [mode for mode in chosen["modes"] if mode != "training"]:
        raise ValueError(f"modes={wrong}: a table by module shows a training step; leave --modes out.")
    models = read_models(options)
    check(options, chosen, models)
    environment = Environment(tuple(models), options.dtype, 1)
    return run_grid(Modules, output, cases_of(models, options, chosen), measure, environment)


def measure(case: BenchmarkCase, environment: Environment) -> dict[str, Any]:
    """Returns the bytes of the second step, in this process; `out_of_memory` if a case does not fit.

    `peak` and `after` hold the bytes by kind at the step's peak and at its end. `modules` holds for each module its
    `parameters` and `kept`, the bytes that its forward calls leave in memory, outputs included. `forward_peak` and
    `backward_peak` are the peaks of all memory while the module runs. If the loss is computed in blocks, the head
    includes it, because the loss may compute the head's gradients in the forward pass.
    """
    model, _, device, dtype = prepare(case, environment)
    if case.kind == "folded":
        model.config.schedule = "sequential"
    set_checkpointing(model, case.checkpointing)

    figures: dict[str, Any] = {"parameters": model.num_parameters(), "dtype": dtype, "out_of_memory": False}

    def measured() -> dict[str, Any]:
        placed = model.to(device, getattr(torch, dtype))
        figures["weight_bytes"] = parameter_bytes(placed)
        return track(placed, random_ids(placed, case.batch, case.length), case.optimizer)

    return or_out_of_memory(figures, measured)


def track(model: Any, ids_BN: torch.Tensor, with_optimizer: bool) -> dict[str, Any]:
    optimizer = adamw(model) if with_optimizer else None
    step = training_step(model, ids_BN, optimizer)
    step()  # creates the optimizer's states
    model.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(model, ids_BN, *([optimizer] if optimizer else []))
    head = HeadWithLoss(model.get_output_embeddings())  # kept alive here: the tracker forgets deleted modules
    with tracker, head.count_losses():
        step()
    device = ids_BN.device
    return {
        "peak": _by_kind(tracker.get_tracker_snapshot("peak")[device]),
        "after": _by_kind(tracker.get_tracker_snapshot()[device]),
        "modules": [_figures(stats, device) for stats in tracker.memory_tracking.values()],  # in the order of calls
    }


class HeadWithLoss(nn.Module):
    """Shows the loss in blocks to the tracker, which sees only modules: it uses the head's weights uncalled."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, loss: Callable, *arguments: Any) -> Any:
        return loss(*arguments)

    @contextmanager
    def count_losses(self) -> Iterator[None]:
        """Turns losses that are computed in blocks into calls of this module."""
        with ExitStack() as patches:
            for owner, name in ((LossAccumulator, "take_block"), (ChunkedLossLlama, "loss_in_blocks")):
                call = partialmethod(_call_through, self, getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, call))
            yield


def _call_through(owner: Any, module: nn.Module, loss: Callable, *arguments: Any) -> Any:
    return module(loss, owner, *arguments)


def _by_kind(snapshot: dict[Any, int]) -> dict[str, int]:
    found = {name: snapshot[kind] for kind in snapshot if (name := KINDS.get(getattr(kind, "name", "")))}
    return found | {"total": snapshot["Total"]}


def _figures(stats: _ModMemStats, device: torch.device) -> dict[str, Any]:
    def totals(state: _ModState) -> list[int]:
        return [snapshot[device]["Total"] for snapshot in stats.snapshots.get(state, ())]

    before, after = totals(_ModState.PRE_FW), totals(_ModState.POST_FW)
    return {
        "module": HEAD if stats.mod_fqn == HeadWithLoss.__name__ else stats.mod_fqn.partition(".")[2],
        "parameters": stats.parameter_mem,
        "kept": sum(after) - sum(before),
        "forward_peak": max(totals(_ModState.PEAK_FW)),
        "backward_peak": max(totals(_ModState.PEAK_BW), default=None),
    }
