"""Times the implementations of attention on this machine, for shapes from single segments to long texts.

Prints docs/results/attention/attention.txt. A case is a forward pass, and in training also the backward pass; figures
are medians in turn after a warm-up. The last table holds the errors of bfloat16 against float64.

Axes: B rows, K keys, H query heads, G key/value heads, L segment length, E head dimension.
"""

from functools import partial
from itertools import product
from typing import Any

import torch

from condense.attention import IMPLEMENTATIONS, AttentionMask, choose_attention
from condense.eval.results import Table, hardware
from condense.segmentation import SegmentPositions

from .timing import dtype_name, medians_in_turn

REPEATS = 7
NAMES = ("sdpa", "blocked", "eager")
CANDIDATES = NAMES[:2]  # "auto" chooses from these: eager keeps every segment's scores for the backward pass
TOLERANCE = 1.05
# Rows, query heads, key heads, head width. The rows of a wavefront are its layers.
SHAPES = {
    "table 1": (1, 32, 8, 64),
    "table 1, a wave": (4, 32, 8, 64),
    "stories": (1, 8, 4, 8),
    "stories, 8 rows": (8, 8, 4, 8),
    "not grouped": (4, 12, 12, 64),
    "one key head": (1, 8, 1, 64),
}
CASES = [
    *product(["table 1"], [64, 128, 256, 512, 1024, 2048], ["training"]),
    *product(["table 1, a wave"], [64, 256, 512], ["training"]),
    *product(["stories", "stories, 8 rows", "not grouped"], [32, 64, 256], ["training"]),
    *product(["one key head"], [256, 512, 1024, 2048], ["training"]),
    *product(["table 1"], [256, 512, 2048], ["durations", "reading"]),
    *product(["table 1", "table 1, a wave", "stories"], [256, 512], ["decoding"]),
]
Tensors = list[torch.Tensor]  # queries, keys, values


def case_of(shape: str, length: int, mode: str, dtype: torch.dtype) -> tuple[Tensors, AttentionMask]:
    """Returns the tensors and mask of a text's second segment, which sees a memory and itself."""
    rows, heads, key_heads, width = SHAPES[shape]
    positions = SegmentPositions(rows, length)
    *_, chunk = list(positions.chunks([2 * length - (mode == "decoding")] * rows))
    if mode == "decoding":
        (chunk,) = positions.chunks([1] * rows)
    keys = chunk.visible_keys.stop - chunk.visible_keys.start
    training = mode in ("training", "durations")
    query_BHLE = torch.randn(rows, chunk.width, heads, width, dtype=dtype).transpose(1, 2).requires_grad_(training)
    key_BGKE, value_BGKE = (
        torch.randn(rows, key_heads, keys, width, dtype=dtype, requires_grad=training) for _ in range(2)
    )
    log_durations_BK = torch.rand(rows, keys).log() if mode == "durations" else None
    return [query_BHLE, key_BGKE, value_BGKE], AttentionMask(chunk, log_durations_BK)


def attend(name: str, tensors: Tensors, mask: AttentionMask) -> torch.Tensor:
    implementation: Any = IMPLEMENTATIONS[name]
    return implementation(*tensors, mask, tensors[0].shape[-1] ** -0.5, 0.0)


def run(name: str, tensors: Tensors, mask: AttentionMask) -> None:
    output_BLHE = attend(name, tensors, mask)
    if tensors[0].requires_grad:
        torch.autograd.grad(output_BLHE, tensors, torch.ones_like(output_BLHE))


def times(dtype: torch.dtype) -> Table:
    """Times each implementation in each case, and says whether "auto" takes the faster one of its candidates."""
    columns = ["shape", "segment", "mode", *[f"{name} [ms]" for name in NAMES]]
    columns += ["sdpa / blocked", "auto takes", "auto / better"]
    rows: list[list[Any]] = []
    right = 0
    for shape, length, mode in CASES:
        tensors, mask = case_of(shape, length, mode, dtype)
        seconds = medians_in_turn({name: partial(run, name, tensors, mask) for name in NAMES}, REPEATS)
        chosen = choose_attention(tensors[0], tensors[1], 0.0)
        over = seconds[chosen] / min(seconds[name] for name in CANDIDATES)
        right += over <= TOLERANCE
        figures = [f"{1000 * value:.2f}" for value in seconds.values()]
        ratio = f"{seconds['sdpa'] / seconds['blocked']:.2f}"
        rows.append([shape, length, mode, *figures, ratio, chosen, f"{over:.2f}"])
    counted = f"auto is within 5% of the better one of sdpa and blocked in {right} of {len(rows)} cases"
    return Table(f"{dtype_name(dtype)}: {counted}", columns, rows)


def results_of(name: str, tensors: Tensors, mask: AttentionMask) -> Tensors:
    """Returns the output and the gradients."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output_BLHE = attend(name, tensors, mask)
    gradients = torch.autograd.grad(output_BLHE.sum(), tensors)
    return [output_BLHE.double(), *(gradient.double() for gradient in gradients)]


def errors() -> Table:
    """Returns the errors of bfloat16 against eager attention in float64."""
    rows: list[list[Any]] = []
    for deviation in (1, 8):
        tensors, mask = case_of("table 1", 128, "training", torch.bfloat16)
        tensors = [(deviation * tensors[0].detach()).requires_grad_(), *tensors[1:]]
        exact = results_of("eager", [tensor.double() for tensor in tensors], mask)
        for name in NAMES:
            pairs = zip(results_of(name, tensors, mask), exact, strict=True)
            distances = [(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs]
            rows.append([deviation, name, *(f"{distance:.4f}" for distance in distances)])
    columns = ["standard deviation of scores", "implementation", "output", "of queries", "of keys", "of values"]
    return Table("bfloat16: relative errors of the output and of gradients", columns, rows)


def main() -> None:
    print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads; medians of {REPEATS}")
    for dtype in (torch.bfloat16, torch.float32):
        print(times(dtype))
    print(errors())


if __name__ == "__main__":
    main()
