"""The least time of a training step of the Table I model on this machine: multiplications and attention, timed alone.

Prints docs/results/profile-cpu/floor.txt.

Axes: B rows, N tokens of an input, K keys, H query heads, G key/value heads, E head dimension, D hidden size,
I intermediate size.
"""

import torch
import torch.nn.functional as F

from condense.attention import AttentionMask, attend
from condense.segmentation import SegmentPositions

from ..models import table_1
from .timing import dtype_name, medians_in_turn

TOKENS, SEGMENT, VOCABULARY = 8192, 256, 8192
SHAPE = table_1()
WIDTH, INTERMEDIATE, LAYERS = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
HEADS, KEY_HEADS, HEAD_WIDTH = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
# The keys and values of the memories are projected once more.
LAYER_WEIGHTS = WIDTH * (2 * HEADS * HEAD_WIDTH + 2 * KEY_HEADS * HEAD_WIDTH + 3 * INTERMEDIATE)
STOCK_WEIGHTS = LAYERS * LAYER_WEIGHTS + VOCABULARY * WIDTH
FOLDED_WEIGHTS = STOCK_WEIGHTS + LAYERS * WIDTH * 2 * KEY_HEADS * HEAD_WIDTH
# Kind: tokens that one call computes, keys that it sees, weights.
KINDS = {"folded": (SEGMENT, 2 * SEGMENT, FOLDED_WEIGHTS), "stock": (TOKENS, TOKENS, STOCK_WEIGHTS)}


def product_rates(tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """Operations a second of a step's products: forward, gradients of inputs, gradients of weights."""
    x_ND, weight_ID = torch.randn(tokens, WIDTH, dtype=dtype), torch.randn(INTERMEDIATE, WIDTH, dtype=dtype)
    gradient_NI = torch.randn(tokens, INTERMEDIATE, dtype=dtype)
    calls = {
        "forward": lambda: x_ND @ weight_ID.T,
        "input": lambda: gradient_NI @ weight_ID,
        "weight": lambda: gradient_NI.T @ x_ND,
    }
    operations = 2 * tokens * WIDTH * INTERMEDIATE
    return {name: operations / medians_in_turn({name: call}, 15)[name] for name, call in calls.items()}


def attention_seconds(kind: str, tokens: int, keys: int, dtype: torch.dtype) -> float:
    """Forward and backward of one call in one layer; of a folded model with a memory."""
    query_BHNE = torch.randn(1, HEADS, tokens, HEAD_WIDTH, dtype=dtype, requires_grad=True)
    key_BGKE, value_BGKE = (
        torch.randn(1, KEY_HEADS, keys, HEAD_WIDTH, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    _, chunk = SegmentPositions(1, SEGMENT).chunks([2 * SEGMENT])
    after_a_memory = AttentionMask(chunk)

    def step() -> None:
        if kind == "stock":
            output = F.scaled_dot_product_attention(query_BHNE, key_BGKE, value_BGKE, is_causal=True, enable_gqa=True)
        else:
            output = attend("auto", query_BHNE, key_BGKE, value_BGKE, after_a_memory, HEAD_WIDTH**-0.5, 0.0)
        output.sum().backward()

    return medians_in_turn({kind: step}, 3)[kind]


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS:,} tokens, forward and backward")
    for dtype in (torch.float32, torch.bfloat16):
        name, floors = dtype_name(dtype), {}
        for kind, (tokens, keys, weights) in KINDS.items():
            rates = product_rates(tokens, dtype)
            products = sum(2 * TOKENS * weights / rate for rate in rates.values())
            attention = LAYERS * TOKENS // tokens * attention_seconds(kind, tokens, keys, dtype)
            floors[kind] = products + attention
            listed = ", ".join(f"{part} {rate / 1e9:.0f}" for part, rate in rates.items())
            print(f"{name}, {kind}, {tokens} tokens at once [Gflop/s]: {listed}")
            print(f"{name}, {kind}: multiplications {products:.1f} s, attention {attention:.1f} s")
        print(f"{name}: stock / folded of these alone: {floors['stock'] / floors['folded']:.2f}")


if __name__ == "__main__":
    main()
