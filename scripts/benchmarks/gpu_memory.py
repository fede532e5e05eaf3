"""Compares the estimate of `condense train --dry-run` with the memory that a GPU used.

Prints docs/results/gpu/memory.txt from the training steps in the files beside it: forward and backward passes in
bfloat16, without an optimizer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from condense import CondenseConfig
from condense.eval.results import Table
from condense.training.planning.memory import MemoryEstimate, estimate
from condense.training.recipe import Recipe

from .gpu.comparison import variant_name
from .gpu.sizes import REAL

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "gpu"  # of a checkout
FILES = ("gpu.json", "longest/gpu.json", "large/gpu.json", "training/gpu.json")
COLUMNS = ["shape", "tokens", "model", "estimated [MiB]", "of it logits", "measured [MiB]", "estimated / measured"]


def recipe_of(point: dict[str, Any]) -> Recipe:
    """Returns the recipe of a step on one text of the point's length."""
    folded = point["kind"] == "folded"
    segments = {"segment_length": point["segment_length"], "checkpoint_segments": point["checkpoint_segments"]}
    return Recipe.model_validate(
        {
            "model": {"kind": "condense" if folded else "stock", "source": "none", **(segments if folded else {})},
            "output": "none",
            "data": {"task": "passkey"},
            "stages": [{"total_length": point["length"], "steps": 100}],
            "global_batch": 1,
            "attention": point["attention"],
            "gradient_checkpointing": point["checkpointing"],
        }
    )


def is_large(point: dict[str, Any]) -> bool:
    return point["hidden_size"] == REAL.large["hidden_size"]


def estimated_bytes(point: dict[str, Any]) -> tuple[int, int]:
    """Returns the estimated bytes of a pass, with weights and gradients and without an optimizer; and of its logits."""
    config = CondenseConfig(
        **REAL.large if is_large(point) else REAL.table_1, segment_length=point["segment_length"] or point["length"]
    )
    parts: MemoryEstimate = estimate(config, recipe_of(point), {"zero_optimization": {"stage": 0}}, ranks=1)
    in_pass = parts.memories + parts.activations + parts.summed_gradients + parts.loss
    return parts.weights + in_pass, parts.loss


def training_steps() -> Iterator[dict[str, Any]]:
    """Yields the stock model's steps that fitted into memory. Folded models now compute their loss in another way."""
    points = [point for file in FILES for point in json.loads((MEASURED / file).read_text())["points"]]
    for point in points:
        if point["kind"] != "stock":
            continue
        if point["mode"] == "training" and not point["out_of_memory"]:
            yield point
        for length, trial in sorted(point.get("tried", {}).items(), key=lambda tried: int(tried[0])):
            if trial["seconds"] is not None:
                step = {"length": int(length), "peak_bytes": trial["peak_bytes"]}
                yield point | step | {"hidden_size": REAL.large["hidden_size"]}


def memory_table() -> Table:
    rows, ratios = [], []
    for point in training_steps():
        (estimated, logits), measured = estimated_bytes(point), point["peak_bytes"]
        ratios.append(estimated / measured)
        sizes = [f"{size / 2**20:,.0f}" for size in (estimated, logits, measured)]
        shape = "1.2B" if is_large(point) else "Table I"
        rows.append([shape, f"{point['length']:,}", variant_name(point), *sizes, f"{ratios[-1]:.3f}"])
    span = f"{min(ratios):.2f} to {max(ratios):.2f}"
    title = f"estimated / measured: {span} in {len(ratios)} training steps of stock models"
    return Table(title, COLUMNS, rows)


def main() -> None:
    print(memory_table())


if __name__ == "__main__":
    main()
