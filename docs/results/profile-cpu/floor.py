"""What a training step of the Table I model can't do without on this machine: multiplications and attention, alone."""

import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

WIDTH, INTERMEDIATE, LAYERS, HEADS, HEAD_WIDTH, TOKENS = 512, 8192, 4, 32, 64, 8192


def seconds(function, repeats):
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
for dtype in (torch.float32, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    for rows in (256, 512, 8192):
        x, weight, gradient = (
            torch.randn(shape, dtype=dtype) for shape in ((rows, WIDTH), (INTERMEDIATE, WIDTH), (rows, INTERMEDIATE))
        )
        work = {"forward": (x, weight.T), "input": (gradient, weight), "weight": (gradient.T, x)}
        rates = [
            f"{kind} {2 * rows * WIDTH * INTERMEDIATE / seconds(partial(torch.matmul, *factors), 7) / 1e9:.0f}"
            for kind, factors in work.items()
        ]
        print(f"{name}, {rows} tokens at once [Gflop/s]: {', '.join(rates)}")
    for kind, queries, keys in (("folded, segment 256", 256, 512), ("stock", TOKENS, TOKENS)):
        q = torch.randn(1, HEADS, queries, HEAD_WIDTH, dtype=dtype, requires_grad=True)
        k, v = (torch.randn(1, HEADS, keys, HEAD_WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))

        def step(q=q, k=k, v=v):
            F.scaled_dot_product_attention(q, k, v, is_causal=q.shape == k.shape).sum().backward()

        total = LAYERS * TOKENS // queries * seconds(step, 3)
        print(f"{name}, attention, {kind}, forward and backward, {LAYERS} layers, {TOKENS} tokens: {total:.1f} s")
