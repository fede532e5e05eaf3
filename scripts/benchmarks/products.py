"""Times products of linear maps in float32 in turn: torch's own (MKL) and condense.ops.linear's (oneDNN).

Prints docs/results/products/products.txt. A case is a forward pass, with or without the gradients of input and weight;
figures are medians after a warm-up. Run it with OMP_NUM_THREADS=1 and 2.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from condense.eval.results import Table, hardware
from condense.ops.linear import ONEDNN_MULTIPLICATIONS, onednn_linear

from .timing import medians_in_turn

REPEATS = 9
# Tokens of a segment or a text, input width, output width.
SHAPES = [
    (64, 128, 344), (64, 256, 256), (64, 512, 512), (64, 512, 1376), (256, 512, 512), (256, 512, 1376),
    (64, 1024, 1024), (64, 2048, 2048), (256, 1024, 1024), (256, 2048, 2048), (256, 2048, 5632), (256, 5632, 2048),
    (256, 2048, 8192), (1024, 2048, 5632), (4096, 512, 1376), (4096, 2048, 5632),
]  # fmt: skip
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run(product: Product, tensors: tuple[torch.Tensor, ...], training: bool) -> None:
    input_NI, weight_OI, gradient_NO = tensors
    with torch.set_grad_enabled(training):
        output_NO = product(input_NI, weight_OI)
    if training:
        torch.autograd.grad(output_NO, [input_NI, weight_OI], gradient_NO)


def times(shape: tuple[int, int, int], repeats: int = REPEATS) -> list[str]:
    """Returns a line of the table."""
    tokens, inputs, outputs = shape
    tensors = (
        torch.randn(tokens, inputs, requires_grad=True),
        torch.randn(outputs, inputs, requires_grad=True),
        torch.randn(tokens, outputs),
    )
    line = [f"{tokens:,} x {inputs:,} x {outputs:,}", f"2^{math.log2(math.prod(shape)):.1f}"]
    for training in (False, True):
        products: dict[str, Product] = {"torch": F.linear, "oneDNN": partial(onednn_linear, bias_O=None)}
        seconds = medians_in_turn(
            {name: partial(run, one, tensors, training) for name, one in products.items()}, repeats
        )
        line += [f"{1000 * value:.2f}" for value in seconds.values()] + [f"{seconds['torch'] / seconds['oneDNN']:.2f}"]
    return line


def main() -> None:
    torch.manual_seed(0)
    columns = ["tokens x in x out", "multiplications"]
    for name in ("forward", "with gradients"):
        columns += [f"{name}: torch [ms]", "oneDNN [ms]", "torch / oneDNN"]
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    taken = (
        f"float32; condense.ops.linear takes oneDNN from 2^{math.log2(ONEDNN_MULTIPLICATIONS):.0f} multiplications on"
    )
    print(Table(taken, columns, [times(shape) for shape in SHAPES]))


if __name__ == "__main__":
    main()
