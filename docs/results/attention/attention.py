"""Implementations of attention on this machine in turn, from the shapes that segments have to those of long texts.

Prints attention.txt. A case is read forward (and backward, where it is a training step's), after a warm-up; figures are
medians of repeats in which the implementations take turns. Last the errors of bfloat16, against float64.
"""

import statistics
import time
from itertools import product

import torch

from condense.attention import IMPLEMENTATIONS, Visibility, choose_attention
from condense.segmentation import Cursor
from eval.results import Table, hardware

REPEATS = 7
NAMES = ("sdpa", "blocked", "eager")
CANDIDATES = NAMES[:2]  # eager keeps the scores of every segment for the backward pass
# Rows, query heads, key heads, head width. A wave's rows are its layers: 4 rows are those of a model of 4 layers.
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


def case_of(shape: str, length: int, mode: str, dtype: torch.dtype):
    rows, heads, key_heads, width = SHAPES[shape]
    cursor = Cursor(rows, length)
    *_, piece = list(cursor.pieces([2 * length - (mode == "decoding")] * rows))
    if mode == "decoding":
        (piece,) = cursor.pieces([1] * rows)
    keys = piece.visible_keys.stop - piece.visible_keys.start
    training = mode in ("training", "durations")
    query = torch.randn(rows, piece.width, heads, width, dtype=dtype).transpose(1, 2).requires_grad_(training)
    key, value = (torch.randn(rows, key_heads, keys, width, dtype=dtype, requires_grad=training) for _ in range(2))
    weighed = torch.rand(rows, keys).log() if mode == "durations" else None
    return (query, key, value), Visibility(piece, weighed)


def seconds_of(name, tensors, visibility, training) -> float:
    start = time.perf_counter()
    output = IMPLEMENTATIONS[name](*tensors, visibility, tensors[0].shape[-1] ** -0.5, 0.0)
    if training:
        torch.autograd.grad(output, tensors, torch.ones_like(output))
    return time.perf_counter() - start


columns = [
    "shape",
    "segment",
    "mode",
    *[f"{name} [ms]" for name in NAMES],
    "sdpa / blocked",
    "auto takes",
    "auto / better",
]
print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads; medians of {REPEATS}")
for dtype in (torch.bfloat16, torch.float32):
    rows, right = [], 0
    for shape, length, mode in CASES:
        tensors, visibility = case_of(shape, length, mode, dtype)
        training = tensors[0].requires_grad
        taken = {name: [] for name in NAMES}
        for _ in range(1 + REPEATS):
            for name, times in taken.items():
                times.append(seconds_of(name, tensors, visibility, training))
        middle = {name: 1000 * statistics.median(times[1:]) for name, times in taken.items()}
        chosen = choose_attention(*tensors[:2], visibility, 0.0)
        over = middle[chosen] / min(middle[name] for name in CANDIDATES)
        right += over <= 1.05
        figures = [f"{value:.2f}" for value in middle.values()]
        rows.append([shape, length, mode, *figures, f"{middle['sdpa'] / middle['blocked']:.2f}", chosen, f"{over:.2f}"])
    name = str(dtype).removeprefix("torch.")
    print(
        Table(
            f"{name}: auto is within 5% of the better one of sdpa and blocked in {right} of {len(rows)} cases",
            columns,
            rows,
        )
    )


def results_of(name, tensors, visibility):
    """Output and gradients."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output = IMPLEMENTATIONS[name](*tensors, visibility, tensors[0].shape[-1] ** -0.5, 0.0)
    return [output.double(), *(gradient.double() for gradient in torch.autograd.grad(output.sum(), tensors))]


rows = []
for spread in (1, 8):
    tensors, visibility = case_of("table 1", 128, "training", torch.bfloat16)
    tensors = [(spread * tensors[0].detach()).requires_grad_(), *tensors[1:]]
    exact = results_of("eager", [tensor.double() for tensor in tensors], visibility)
    for name in NAMES:
        errors = [
            (ours - theirs).norm() / theirs.norm()
            for ours, theirs in zip(results_of(name, tensors, visibility), exact, strict=True)
        ]
        rows.append([spread, name, *(f"{error:.4f}" for error in errors)])
columns = ["standard deviation of scores", "implementation", "output", "of queries", "of keys", "of values"]
print(Table("bfloat16: relative errors of the output and of gradients", columns, rows))
