"""Estimates the least time of a training step of the Table I model on this machine, from products and attention only.

Prints a table of docs/results/profile-cpu/README.md.

Axes: B rows, N tokens of an input, K keys, H query heads, G key/value heads, E head dimension, D hidden size,
I intermediate size.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from condense.attention import AttentionMask, attend
from condense.eval.benchmark.models import table_1
from condense.eval.results import Table, hardware
from condense.ops.linear import apply_linear
from condense.segmentation import SegmentPositions

from .timing import dtype_name, medians_in_turn

LENGTHS, SEGMENT, VOCABULARY = (1024, 2048, 4096, 8192), 256, 8192
SHAPE = table_1()
WIDTH, INTERMEDIATE, LAYERS = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
HEADS, KEY_HEADS, HEAD_WIDTH = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
LAYER_WEIGHTS = LAYERS * WIDTH * (2 * HEADS * HEAD_WIDTH + 2 * KEY_HEADS * HEAD_WIDTH + 3 * INTERMEDIATE)
MEMORY_WEIGHTS = LAYERS * WIDTH * 2 * KEY_HEADS * HEAD_WIDTH  # memories' keys and values are one more projection


class Seconds(NamedTuple):
    forward: float
    backward: float


def product_seconds(kind: str, tokens: int, dtype: torch.dtype, repeats: int = 9) -> Seconds:
    """Returns the seconds per operation of a product of `tokens` rows, and of both its gradients (`backward`).

    A product has two operations for each weight and row.
    """
    linear = nn.Linear(WIDTH, INTERMEDIATE, bias=False, dtype=dtype)
    product = partial(apply_linear, linear) if kind == "folded" else linear
    x_ND = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    output_NI = product(x_ND)
    arguments = output_NI, (x_ND, linear.weight), torch.randn_like(output_NI)
    calls = {"forward": lambda: product(x_ND), "backward": lambda: torch.autograd.grad(*arguments, retain_graph=True)}
    operations = 2 * tokens * WIDTH * INTERMEDIATE
    return Seconds(**{name: seconds / operations for name, seconds in medians_in_turn(calls, repeats).items()})


def attention_seconds(kind: str, tokens: int, dtype: torch.dtype, repeats: int = 3) -> Seconds:
    """Returns the seconds of `tokens` tokens in one layer: a whole text, or a folded model's segment after another."""
    keys = tokens if kind == "stock" else 2 * tokens
    query_BHNE = torch.randn(1, HEADS, tokens, HEAD_WIDTH, dtype=dtype, requires_grad=True)
    key_BGKE, value_BGKE = (
        torch.randn(1, KEY_HEADS, keys, HEAD_WIDTH, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    _, chunk = SegmentPositions(1, tokens).chunks([2 * tokens])
    after_a_memory = AttentionMask(chunk)

    def attention() -> torch.Tensor:
        if kind == "stock":
            return F.scaled_dot_product_attention(query_BHNE, key_BGKE, value_BGKE, is_causal=True, enable_gqa=True)
        return attend("auto", query_BHNE, key_BGKE, value_BGKE, after_a_memory, HEAD_WIDTH**-0.5, 0.0)

    output = attention()
    arguments = output, (query_BHNE, key_BGKE, value_BGKE), torch.randn_like(output)
    calls = {"forward": attention, "backward": lambda: torch.autograd.grad(*arguments, retain_graph=True)}
    return Seconds(**medians_in_turn(calls, repeats))


def step_seconds(kind: str, length: int, dtype: torch.dtype) -> tuple[Seconds, Seconds, float]:
    """Returns the seconds of products and attention in a training step, and of the layers' forward pass, which gradient
    checkpointing adds.

    The first segment has no memory, and the last one writes none.
    """
    tokens = SEGMENT if kind == "folded" else length
    later = length // tokens - 1  # segments with a memory
    products, first = product_seconds(kind, tokens, dtype), attention_seconds("stock", tokens, dtype)
    attention = Seconds(*(LAYERS * each for each in first))
    if later:
        after = attention_seconds(kind, tokens, dtype)
        attention = Seconds(*(one + LAYERS * later * each for one, each in zip(attention, after, strict=True)))
    in_layers = 2 * (length * LAYER_WEIGHTS + later * tokens * MEMORY_WEIGHTS)
    in_head = 2 * length * VOCABULARY * WIDTH
    again = in_layers * products.forward + attention.forward
    return Seconds(*((in_layers + in_head) * each for each in products)), attention, again


def row(length: int, dtype: torch.dtype) -> list[str]:
    """Returns the seconds of both models, and the ratios without and with checkpointing."""
    figures, totals = [], {}
    for kind in ("folded", "stock"):
        products, attention, again = step_seconds(kind, length, dtype)
        totals[kind] = sum(products) + sum(attention), sum(products) + sum(attention) + again
        figures += [f"{sum(products):.2f}", f"{sum(attention):.2f}", f"{again:.2f}"]
    ratios = [f"{stock / folded:.2f}" for folded, stock in zip(totals["folded"], totals["stock"], strict=True)]
    return [dtype_name(dtype), f"{length:,}", *figures, *ratios]


def main() -> None:
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    columns = ["dtype", "tokens"]
    columns += [f"{kind}: {part}" for kind in ("folded", "stock") for part in ("products", "attention", "again")]
    columns += ["stock / folded", "with checkpointing"]
    title = "seconds of products and attention alone in a training step; again: those that checkpointing adds"
    lines = [row(length, dtype) for dtype in (torch.float32, torch.bfloat16) for length in LENGTHS]
    print(Table(title, columns, lines))


if __name__ == "__main__":
    main()
