"""What was tried on a CPU: to spare the scores behind the causal mask, a quarter of a segment's behind a memory, with
SDPA's kernel; and how large the blocks of `blocked` attention should be.

Prints tried.txt: forward and backward in milliseconds, medians of repeats in which the variants take turns.
"""

import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

from condense.attention import Visibility, blocked
from condense.segmentation import Cursor
from eval.results import Table, hardware

REPEATS = 11
MIB = 2**20
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def lower_right(num_queries: int, num_keys: int) -> torch.Tensor:
    return torch.arange(num_keys) <= torch.arange(num_queries)[:, None] + num_keys - num_queries


def in_pieces(pieces: int, query, key, value):
    """Queries by pieces, each with the keys that its last query sees."""
    (num_queries, num_keys), outputs = (query.shape[2], key.shape[2]), []
    width = num_queries // pieces
    for begin in range(0, num_queries, width):
        end = num_keys - num_queries + begin + width
        mask = lower_right(width, end)
        outputs.append(
            F.scaled_dot_product_attention(query[:, :, begin : begin + width], key[:, :, :end], value[:, :, :end], mask)
        )
    return torch.cat(outputs, 2)


class Joined(torch.autograd.Function):
    """Memory without a mask and segment as plain causal attention, joined by their sums of exponentials."""

    @staticmethod
    def forward(ctx, query, key, value):
        memory = key.shape[2] - query.shape[2]
        parts = (slice(memory), False), (slice(memory, None), True)
        found = [flash(query, key[:, :, part], value[:, :, part], 0.0, causal) for part, causal in parts]
        log_sum = torch.logaddexp(*[sums for _, sums in found])
        output = sum(part * (sums - log_sum).exp().unsqueeze(-1).to(part.dtype) for part, sums in found)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.parts = parts
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, log_sum = ctx.saved_tensors
        found = [
            flash_backward(gradient, query, key[:, :, part], value[:, :, part], output, log_sum, 0.0, causal)
            for part, causal in ctx.parts
        ]
        to_query, to_key, to_value = zip(*found, strict=True)
        return sum(to_query), torch.cat(to_key, 2), torch.cat(to_value, 2)


VARIANTS = {
    "one call with a mask": partial(in_pieces, 1),
    "two pieces": partial(in_pieces, 2),
    "four pieces": partial(in_pieces, 4),
    "memory and segment": Joined.apply,
}


def in_blocks(block_bytes: int, query, key, value):
    *_, piece = Cursor(len(query), query.shape[2]).pieces([key.shape[2]] * len(query))
    blocked.BLOCK_BYTES = block_bytes
    return blocked.blocked_attention(query, key, value, Visibility(piece), query.shape[-1] ** -0.5, 0.0)


SIZES = {f"{size:g} MiB": partial(in_blocks, int(size * MIB)) for size in (0.5, 1, 2, 4, 8, 16)}


def milliseconds(variant, tensors, gradient) -> float:
    start = time.perf_counter()
    torch.autograd.grad(variant(*tensors), tensors, gradient)
    return 1000 * (time.perf_counter() - start)


print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads; medians of {REPEATS}")


def medians(variants, tensors, gradient) -> list[str]:
    taken = {name: [] for name in variants}
    for _ in range(1 + REPEATS):
        for name, times in taken.items():
            times.append(milliseconds(variants[name], tensors, gradient))
    return [f"{statistics.median(times[1:]):.1f}" for times in taken.values()]


rows = []
for dtype in (torch.bfloat16, torch.float32):
    for batch, segment in ((1, 256), (4, 256), (1, 512)):
        query = torch.randn(batch, 32, segment, 64, dtype=torch.float64)
        key, value = (torch.randn(batch, 32, 2 * segment, 64, dtype=torch.float64) for _ in range(2))
        expected = VARIANTS["one call with a mask"](query, key, value)
        for variant in VARIANTS.values():
            torch.testing.assert_close(variant(query, key, value), expected)
        tensors = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
        figures = medians(VARIANTS, tensors, torch.randn_like(query).to(dtype))
        rows.append([str(dtype).removeprefix("torch."), batch, segment, *figures])
print(Table("32 heads of width 64 behind a memory, SDPA's kernel [ms]", ["type", "rows", "segment", *VARIANTS], rows))

rows = []
for batch, segment in ((1, 128), (4, 128), (1, 256), (4, 256), (1, 512)):
    query = torch.randn(batch, 32, segment, 64, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.randn(batch, 8, 2 * segment, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    matrix = f"{4 * segment * 2 * segment * 2 / MIB:g}"
    rows.append([batch, segment, matrix, *medians(SIZES, (query, key, value), torch.randn_like(query))])
columns = ["rows", "segment", "scores of a key head [MiB]", *SIZES]
print(Table("32 heads over 8 of width 64 in bfloat16, blocked by size of its blocks [ms]", columns, rows))
