"""Tables and picture of the memory of a training step by kind of tensor and by module."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..results import Table, picture
from ..tables import select
from .tables import group_by, label, model_table, workload

SHARED = ("batch", "attention", "checkpointing", "optimizer")  # all points of a table share them
KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary", "buffers", "inputs")
LAYER = r"\w+\.(layers|layer|h|blocks)\.\d+"
ROLES = {  # the modules of each line, by their names in transformers' models
    "whole model": r"",
    "embedding": r"\w+\.(embed_tokens|embed_in|embeddings|wte)",
    "layers": LAYER,
    "attention": rf"{LAYER}\.(self_attn|attention|attn)",
    "mixer": rf"{LAYER}\.mixer",
    "MLP": rf"{LAYER}\.(mlp|feed_forward)",
    "norms": rf"\w+\.(norm|final_layer_norm|ln_f|norm_f)|{LAYER}\.(\w*norm|ln_\d)",
    "head": r"lm_head|embed_out",
}


def tables(results: dict[str, Any]) -> list[Table]:
    """Returns tables of the models, and for each group of the bytes by kind of tensor, and by module."""
    made = model_table(results)
    for shared, points in group_by(results["points"], *SHARED):
        columns = ["tokens", "model", *(f"{kind} [MiB]" for kind in KINDS)]
        columns += ["all at the peak [MiB]", "after the step [MiB]"]
        rows = []
        for point in points:
            cells = ["OOM", *[""] * (len(columns) - 3)]
            if not point["out_of_memory"]:
                cells = list(map(_mib, (*(point["peak"][kind] for kind in (*KINDS, "total")), point["after"]["total"])))
            rows.append([f"{point['length']:,}", label(point), *cells])
        made.append(Table(f"{workload(shared)}: tensors at the peak", columns, rows))
        columns = ["tokens", "model", "module", "number", "weights [MiB]", "kept by the forward pass [MiB]"]
        columns += ["peak in its forward pass [MiB]", "peak in its backward pass [MiB]"]
        rows = [
            [f"{point['length']:,}", label(point), *line]
            for point in select(points, out_of_memory=False)
            for line in _lines(point["modules"])
        ]
        made.append(Table(f"{workload(shared)}: by module, peaks of all memory while it runs", columns, rows))
    return made


def _lines(modules: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Returns a line for each role: sums over its modules, and the highest peaks."""
    lines = []
    for role, pattern in ROLES.items():
        if mine := [module for module in modules if re.fullmatch(pattern, module["module"])]:
            sums = [sum(module[name] for module in mine) for name in ("parameters", "kept")]
            peaks = ([module[name] for module in mine] for name in ("forward_peak", "backward_peak"))
            highest = (max((peak for peak in of_role if peak is not None), default=None) for of_role in peaks)
            lines.append([role, len(mine), *map(_mib, (*sums, *highest))])
    return lines


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.2f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a bar for each point, divided by kind of tensor."""
    points = select(results["points"], out_of_memory=False)
    with picture(path, figsize=(9, 1 + 0.4 * len(points))) as axes:
        names = [f"{label(point)}, {point['length']:,} tokens\n{workload(point)}" for point in points]
        left = [0.0] * len(points)
        for kind in KINDS:
            sizes = [point["peak"][kind] / 2**20 for point in points]
            axes.barh(range(len(points)), sizes, left=left, label=kind)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        axes.set_yticks(range(len(points)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("tensors at the peak of a training step [MiB]")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
