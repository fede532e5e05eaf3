"""Times alternatives to one call of attention on a CPU, and block sizes of `blocked` attention.

The causal mask hides a quarter of the scores of a segment with a memory; the alternatives save their computation with
SDPA's kernel. Prints the last table of docs/results/attention/README.md: forward and backward in milliseconds, medians
in turn.

Axes: B rows, K keys, H heads, L segment length, E head dimension; F queries of a part of a segment, M tokens of the
memory.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from condense.attention import AttentionMask, blocked
from condense.eval.results import Table, hardware
from condense.segmentation import SegmentPositions

from .timing import dtype_name, medians_in_turn

REPEATS = 11
MIB = 2**20
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def lower_right(num_queries: int, num_keys: int) -> torch.Tensor:
    return torch.arange(num_keys) <= torch.arange(num_queries)[:, None] + num_keys - num_queries


def in_parts(parts: int, query_BHLE: torch.Tensor, key_BHKE: torch.Tensor, value_BHKE: torch.Tensor) -> torch.Tensor:
    """Attends with equal parts of the queries, each with the keys that its last query sees."""
    num_queries, num_keys = query_BHLE.shape[2], key_BHKE.shape[2]
    width, outputs = num_queries // parts, []
    for begin in range(0, num_queries, width):
        end = num_keys - num_queries + begin + width
        query_BHFE = query_BHLE[:, :, begin : begin + width]
        mask = lower_right(width, end)
        outputs.append(F.scaled_dot_product_attention(query_BHFE, key_BHKE[:, :, :end], value_BHKE[:, :, :end], mask))
    return torch.cat(outputs, 2)


class Joined(torch.autograd.Function):
    """Attends to the memory without a mask and to the segment causally; joins both by their sums of exponentials."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        memory = key.shape[2] - query.shape[2]
        parts = (slice(memory), False), (slice(memory, None), True)
        found = [flash(query, key[:, :, part], value[:, :, part], 0.0, causal) for part, causal in parts]
        log_sum = torch.logaddexp(*[sums for _, sums in found])
        output = sum(part * (sums - log_sum).exp().unsqueeze(-1).to(part.dtype) for part, sums in found)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.parts = parts
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, log_sum = ctx.saved_tensors
        found = [
            flash_backward(gradient, query, key[:, :, part], value[:, :, part], output, log_sum, 0.0, causal)
            for part, causal in ctx.parts
        ]
        to_query, to_key, to_value = zip(*found, strict=True)
        return sum(to_query), torch.cat(to_key, 2), torch.cat(to_value, 2)


ALTERNATIVES: dict[str, Attention] = {
    "one call with a mask": partial(in_parts, 1),
    "two parts": partial(in_parts, 2),
    "four parts": partial(in_parts, 4),
    "memory and segment": Joined.apply,
}


def in_blocks(block_bytes: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    *_, chunk = SegmentPositions(len(query), query.shape[2]).chunks([key.shape[2]] * len(query))
    blocked.BLOCK_BYTES = block_bytes
    return blocked.blocked_attention(query, key, value, AttentionMask(chunk), query.shape[-1] ** -0.5, 0.0)


SIZES: dict[str, Attention] = {f"{size:g} MiB": partial(in_blocks, int(size * MIB)) for size in (0.5, 1, 2, 4, 8, 16)}


def milliseconds(
    variants: Mapping[str, Attention], tensors: tuple[torch.Tensor, ...], gradient: torch.Tensor
) -> list[str]:
    """Returns the median time of each variant's forward and backward pass, in turn."""

    def call(variant: Attention) -> None:
        torch.autograd.grad(variant(*tensors), tensors, gradient)

    seconds = medians_in_turn({name: partial(call, variant) for name, variant in variants.items()}, REPEATS)
    return [f"{1000 * value:.1f}" for value in seconds.values()]


def alternatives() -> Table:
    rows: list[list[Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for batch, segment in ((1, 256), (4, 256), (1, 512)):
            query = torch.randn(batch, 32, segment, 64, dtype=torch.float64)
            key, value = (torch.randn(batch, 32, 2 * segment, 64, dtype=torch.float64) for _ in range(2))
            expected = ALTERNATIVES["one call with a mask"](query, key, value)
            for variant in ALTERNATIVES.values():
                torch.testing.assert_close(variant(query, key, value), expected)
            tensors = tuple(tensor.to(dtype).requires_grad_() for tensor in (query, key, value))
            figures = milliseconds(ALTERNATIVES, tensors, torch.randn_like(query).to(dtype))
            rows.append([dtype_name(dtype), batch, segment, *figures])
    columns = ["type", "rows", "segment", *ALTERNATIVES]
    return Table("32 heads of width 64 after a memory, SDPA's kernel [ms]", columns, rows)


def block_sizes() -> Table:
    rows: list[list[Any]] = []
    for batch, segment in ((1, 128), (4, 128), (1, 256), (4, 256), (1, 512)):
        query = torch.randn(batch, 32, segment, 64, dtype=torch.bfloat16, requires_grad=True)
        key, value = (
            torch.randn(batch, 8, 2 * segment, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        matrix = f"{4 * segment * 2 * segment * 2 / MIB:g}"
        rows.append([batch, segment, matrix, *milliseconds(SIZES, (query, key, value), torch.randn_like(query))])
    columns = ["rows", "segment", "scores of a key head [MiB]", *SIZES]
    return Table("32 heads over 8 of width 64 in bfloat16, blocked by size of its blocks [ms]", columns, rows)


def main() -> None:
    print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads; medians of {REPEATS}")
    print(alternatives())
    print(block_sizes())


if __name__ == "__main__":
    main()
