"""Times training steps with gradient checkpointing by groups of segments, beside a stock model's with checkpointing.

Prints a table of docs/results/profile-cpu/README.md: the Table I model, medians in turn. Each group is recomputed at
once, and waves can run within it. Run it with OMP_NUM_THREADS=2.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from condense.eval.benchmark.models import build_model, set_checkpointing, table_1
from condense.eval.benchmark.workloads import random_ids, training_step
from condense.eval.results import Table, hardware

from .timing import dtype_name, medians_in_turn

LENGTHS, SEGMENT, GROUPS, VOCABULARY = (1024, 2048), 256, (1, 2, 4, 8), 8192


def models(shape: dict[str, Any], segment_length: int, dtype: torch.dtype) -> dict[str, Any]:
    return {kind: build_model(kind, shape, segment_length, "auto").to(dtype) for kind in ("stock", "folded")}


def row(
    built: dict[str, Any], segment_length: int, length: int, groups: Sequence[int], dtype: torch.dtype, repeats: int = 3
) -> list[str]:
    """Returns the seconds of stock and of each group that a text fills, and stock over single segments and the best."""
    steps = {kind: training_step(model, random_ids(model, 1, length)) for kind, model in built.items()}

    def prepared(kind: str, segments: int) -> None:
        set_checkpointing(built[kind], True, segments)
        steps[kind]()

    fits = [segments for segments in groups if segments * segment_length <= length]
    calls = {"stock": partial(prepared, "stock", 1)} | {str(one): partial(prepared, "folded", one) for one in fits}
    seconds = medians_in_turn(calls, repeats)
    stock, folded = seconds["stock"], [seconds[str(one)] for one in fits]
    figures = [f"{one:.2f}" for one in folded] + ["-"] * (len(groups) - len(fits))
    ratios = [f"{stock / one:.2f}" for one in (folded[0], min(folded))]
    return [dtype_name(dtype), f"{length:,}", f"{stock:.2f}", *figures, *ratios]


def main() -> None:
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        built = models(table_1() | {"vocab_size": VOCABULARY}, SEGMENT, dtype)
        rows += [row(built, SEGMENT, length, GROUPS, dtype) for length in LENGTHS]
    columns = ["dtype", "tokens", "stock", *(f"groups of {segments}" for segments in GROUPS)]
    columns += ["stock / groups of 1", "stock / the best"]
    print(Table("seconds of a training step with gradient checkpointing on both sides", columns, rows))


if __name__ == "__main__":
    main()
