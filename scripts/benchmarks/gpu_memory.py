"""Compares the plan of `condense train --dry-run` with the memory that GPUs used.

Prints docs/results/gpu/memory.txt from the training steps in the files beside it: forward and backward passes in
bfloat16, without an optimizer. Folded models are those of an H100, at fb729fd. The bytes reserved by the allocator are
compared where graphs leave its peak incomplete; there the workspace of products is among them. A process reserves more
than its last step: in `h100/gpu.json` the captures of the part before it, and of the variant before it in the same row.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from condense import CondenseConfig
from condense.eval.results import Table
from condense.training.planning.memory import estimate
from condense.training.recipe import Recipe

from .gpu.comparison import variant_name
from .gpu.sizes import REAL

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "gpu"  # of a checkout
STOCK_FILES = ("gpu.json", "longest/gpu.json", "large/gpu.json", "training/gpu.json")
FOLDED_FILES = ("h100/gpu.json", "h100/second/gpu.json")
COLUMNS = ["file", "shape", "tokens", "model", "planned [MiB]", "loss, backward [MiB]", "measured [MiB]", "measured is"]
COLUMNS += ["planned / measured"]


def recipe_of(point: dict[str, Any]) -> Recipe:
    """Returns the recipe of a point's step."""
    model: dict[str, Any] = {"kind": "stock"}
    if point["kind"] == "folded":
        names = "segment_length", "checkpoint_segments", "schedule"
        model = {"kind": "condense"} | {name: point[name] for name in names}
    return Recipe.model_validate(
        {
            "model": {"source": "none", **model},
            "output": "none",
            "data": {"task": "passkey"},
            "stages": [{"total_length": point["length"], "steps": 100}],
            "global_batch": point["batch"],
            "micro_batch": point["batch"],
            "attention": point["attention"],
            "gradient_checkpointing": point["checkpointing"],
        }
    )


def is_large(point: dict[str, Any]) -> bool:
    return point["hidden_size"] == REAL.large["hidden_size"]


def planned_bytes(point: dict[str, Any]) -> tuple[int, int]:
    """Returns the planned bytes of a step after the first, with weights and gradients and without an optimizer; and
    those that the loss and the backward pass have made."""
    shape = REAL.large if is_large(point) else REAL.table_1
    folded = point["kind"] == "folded"
    config = CondenseConfig(**shape, segment_length=point["segment_length"]) if folded else LlamaConfig(**shape)
    parts = estimate(config, recipe_of(point), {"zero_optimization": {"stage": 0}}, ranks=1)
    workspace = 0 if "peak_bytes" in point else parts.process
    return parts.weights + parts.in_pass + parts.graphs + workspace, parts.loss + parts.backward


def training_steps(file: str) -> Iterator[dict[str, Any]]:
    """Yields a file's steps that fitted into memory: stock ones or, in `FOLDED_FILES`, folded ones."""
    kind = "folded" if file in FOLDED_FILES else "stock"
    earlier_rows = set()
    for point in json.loads((MEASURED / file).read_text())["points"]:
        if point["kind"] != kind:
            continue
        if point["mode"] == "training" and not point["out_of_memory"]:
            if "peak_bytes" in point or point["row"] not in earlier_rows:
                yield point
            earlier_rows.add(point["row"])
        for length, trial in sorted(point.get("tried", {}).items(), key=lambda tried: int(tried[0])):
            if trial["seconds"] is not None:
                step = {"length": int(length), "peak_bytes": trial["peak_bytes"]}
                yield point | step | {"hidden_size": REAL.large["hidden_size"]}


def memory_table() -> Table:
    rows = []
    for file in (*STOCK_FILES, *FOLDED_FILES):
        for point in training_steps(file):
            (planned, of_loss), measured = planned_bytes(point), point.get("peak_bytes") or point["reserved_bytes"]
            shape, texts = (
                "1.2B" if is_large(point) else "Table I",
                f"{point['batch']} x " if point["batch"] > 1 else "",
            )
            sizes = [f"{size / 2**20:,.0f}" for size in (planned, of_loss, measured)]
            kind = "peak" if "peak_bytes" in point else "reserved"
            row = [file, shape, f"{texts}{point['length']:,}", variant_name(point), *sizes, kind]
            rows.append([*row, f"{planned / measured:.3f}"])
    return Table("planned and measured memory of training steps", COLUMNS, rows)


def main() -> None:
    print(memory_table())


if __name__ == "__main__":
    main()
