"""What a training step of the Table I model can't do without on this machine: multiplications and attention, alone."""

import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

from condense.attention import Visibility, attend
from condense.segmentation import Cursor

WIDTH, INTERMEDIATE, LAYERS, HEADS, KEY_HEADS, HEAD_WIDTH, TOKENS = 512, 8192, 4, 32, 8, 64, 8192
SEGMENT = 256
BEHIND_A_MEMORY = Visibility(list(Cursor(1, SEGMENT).pieces([2 * SEGMENT]))[1])


def seconds(function, repeats):
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# Of a step: forward, gradients of inputs and of weights. The memories' keys and values are projected once more.
VOCABULARY, KEY_WIDTH = 8192, KEY_HEADS * HEAD_WIDTH
LAYER_WEIGHTS = WIDTH * (2 * HEADS * HEAD_WIDTH + 2 * KEY_WIDTH + 3 * INTERMEDIATE)
STOCK_WEIGHTS = LAYERS * LAYER_WEIGHTS + VOCABULARY * WIDTH
FOLDED_WEIGHTS = STOCK_WEIGHTS + LAYERS * WIDTH * 2 * KEY_WIDTH

print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS:,} tokens, forward and backward")
for dtype in (torch.float32, torch.bfloat16):
    name, floors = str(dtype).removeprefix("torch."), {}
    for kind, rows, keys, weights in (
        ("folded", SEGMENT, 2 * SEGMENT, FOLDED_WEIGHTS),
        ("stock", TOKENS, TOKENS, STOCK_WEIGHTS),
    ):
        x, weight, gradient = (
            torch.randn(shape, dtype=dtype) for shape in ((rows, WIDTH), (INTERMEDIATE, WIDTH), (rows, INTERMEDIATE))
        )
        work = {"forward": (x, weight.T), "input": (gradient, weight), "weight": (gradient.T, x)}
        rates = {
            part: 2 * rows * WIDTH * INTERMEDIATE / seconds(partial(torch.matmul, *factors), 15)
            for part, factors in work.items()
        }
        products = sum(2 * TOKENS * weights / rate for rate in rates.values())

        q = torch.randn(1, HEADS, rows, HEAD_WIDTH, dtype=dtype, requires_grad=True)
        k, v = (torch.randn(1, KEY_HEADS, keys, HEAD_WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))

        def step(kind=kind, q=q, k=k, v=v):
            if kind == "stock":
                output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                output = attend("auto", q, k, v, BEHIND_A_MEMORY, HEAD_WIDTH**-0.5, 0.0)
            output.sum().backward()

        attention = LAYERS * TOKENS // rows * seconds(step, 3)
        floors[kind] = products + attention
        spoken = ", ".join(f"{part} {rate / 1e9:.0f}" for part, rate in rates.items())
        print(f"{name}, {kind}, {rows} tokens at once [Gflop/s]: {spoken}")
        print(f"{name}, {kind}: multiplications {products:.1f} s, attention {attention:.1f} s")
    print(f"{name}: stock / folded of these alone: {floors['stock'] / floors['folded']:.2f}")
