"""Times training steps of a stock Llama with Liger's kernels, plain and compiled, beside the stock and folded models.

    pip install liger-kernel
    python -m scripts.benchmarks.gpu_peers OUTPUT.json

A step is a forward and backward pass of one text in bfloat16, with `IN_A_ROW` steps for each repeat, as in
`scripts/gpu_bench --only steps`. Liger's fused loss takes few tokens at a time if the vocabulary is much larger than
the hidden size, so one contender runs without it (`liger without its loss`).
"""

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from condense.eval.benchmark.cases import ModelVariant
from condense.eval.benchmark.models import build_model, cast_parameters, configure
from condense.eval.benchmark.timing import free_memory, seconds_of, summarize
from condense.eval.benchmark.workloads import random_ids, training_step
from condense.eval.results import Table

from .gpu.parts import CHECKPOINT_SEGMENTS
from .gpu.sizes import LARGE, REAL
from .gpu.steps import IN_A_ROW

SHAPES = {"Table I, 4,096": (REAL.table_1, 4096), "1.2 B, 8,192": (LARGE, 8192)}
KINDS = ("stock", "liger", "liger, compiled", "liger without its loss", "folded")
PATCHED = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")  # what Liger replaces in transformers' module
WARM_UPS, REPEATS = 4, 5
COLUMNS = ["training step", "model", "median [ms]", "lowest to highest [ms]", "time / stock's time"]


@contextmanager
def liger_kernels(model: Any, fused_loss: bool) -> Iterator[None]:
    """Gives a model Liger's kernels; restores what Liger changes for all of transformers' models at the end."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    before = {name: getattr(modeling_llama, name) for name in PATCHED}
    forward = LlamaForCausalLM.forward
    try:
        apply_liger_kernel_to_llama(model=model, cross_entropy=False, fused_linear_cross_entropy=fused_loss)
        yield
    finally:
        LlamaForCausalLM.forward = forward
        for name, value in before.items():
            setattr(modeling_llama, name, value)


@contextmanager
def contender(kind: str, shape: dict[str, Any], device: str) -> Iterator[Any]:
    with torch.device(device):
        built = build_model("folded" if kind == "folded" else "stock", shape, REAL.segment, "sdpa")
    model = cast_parameters(built, torch.bfloat16)
    if not kind.startswith("liger"):
        yield model
        return
    with liger_kernels(model, fused_loss="without" not in kind):
        if kind.endswith("compiled"):
            for layer in model.model.layers:  # they share one compilation
                layer.compile(dynamic=False)
        yield model


def measure(model: Any, kind: str, tokens: int, checkpointing: bool) -> dict[str, Any]:
    folded = kind == "folded"
    variant = ModelVariant(
        kind="folded" if folded else "stock",
        segment_length=REAL.segment if folded else None,
        schedule="auto" if folded else None,
        checkpointing=checkpointing,
        checkpoint_segments=CHECKPOINT_SEGMENTS if folded and checkpointing else 1,
    )
    configure(model, variant)
    step = training_step(model, random_ids(model, 1, tokens))
    for _ in range(WARM_UPS):
        step()
    repeats = [seconds_of(partial(_repeat, step)) / IN_A_ROW for _ in range(REPEATS)]
    model.zero_grad(set_to_none=True)
    return summarize(repeats)


def _repeat(step: Any) -> None:
    for _ in range(IN_A_ROW):
        step()


def measure_all(
    shapes: dict[str, tuple[dict[str, Any], int]], device: str, kinds: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Returns a point for each model of each shape, with and without gradient checkpointing."""
    points = []
    for name, (shape, tokens) in shapes.items():
        for kind in kinds:
            with contender(kind, shape, device) as model:
                for checkpointing in (False, True):
                    row = name + ", checkpointing" * checkpointing
                    points.append({"row": row, "kind": kind, **measure(model, kind, tokens, checkpointing)})
            del model
            free_memory()
    return points


def table(points: list[dict[str, Any]]) -> Table:
    rows = []
    for row in dict.fromkeys(point["row"] for point in points):
        of_row = [point for point in points if point["row"] == row]
        stock = statistics.median(point["seconds"] for point in of_row if point["kind"] == "stock")
        for point in of_row:
            low, high = (f"{1000 * point[name]:.1f}" for name in ("seconds_low", "seconds_high"))
            ratio = f"{point['seconds'] / stock:.2f}"
            rows.append([row, point["kind"], f"{1000 * point['seconds']:.1f}", f"{low} to {high}", ratio])
    return Table("training steps beside a tuned stock model", COLUMNS, rows)


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_peers: there is no CUDA device.")
    if len(sys.argv) != 2:
        sys.exit("gpu_peers: name the JSON file to write.")
    points = measure_all(SHAPES, "cuda", KINDS)
    results = {"device": torch.cuda.get_device_name(), "versions": versions(), "in_a_row": IN_A_ROW, "points": points}
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(points))


if __name__ == "__main__":
    main()
