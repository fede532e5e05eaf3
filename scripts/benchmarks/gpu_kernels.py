"""Times the fused kernels beside their plain forms and Liger's kernels, on a GPU in bfloat16.

    pip install liger-kernel
    python -m scripts.benchmarks.gpu_kernels

Figures are medians of CUDA events. A small operation takes as long as the host needs to launch it.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from condense.eval.results import Table
from condense.ops.kernels.attention_inputs import attention_inputs
from condense.ops.kernels.cross_entropy import cross_entropy_and_gradient, plain_cross_entropy_and_gradient
from condense.ops.kernels.rms_norm import add_rms_norm, plain_rms_norm, rms_norm
from condense.ops.kernels.rotary import plain_rotate, rotate
from condense.ops.kernels.swiglu import plain_silu_product, silu_product

REPEATS, WARM_UPS, EPSILON = 20, 5, 1e-5
TOKENS, VOCABULARY, WIDTH, INTERMEDIATE, LAYERS = 4096, 128_256, 2048, 8192, 16
HEADS, GROUPS, HEAD, SEGMENT = 32, 8, 64, 512
COLUMNS = ["operation", "form", "forward [ms]", "backward [ms]"]
Function = Callable[..., Any]


def milliseconds(call: Callable[[], object]) -> float:
    for _ in range(WARM_UPS):
        call()
    pairs = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def row(operation: str, form: str, function: Function, inputs: Sequence[torch.Tensor]) -> list[str]:
    leaves = [one.detach().requires_grad_() for one in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    factors = [torch.randn_like(one) for one in outputs]
    forward = milliseconds(lambda: function(*leaves))
    backward = milliseconds(lambda: torch.autograd.grad(outputs, leaves, factors, retain_graph=True))
    return [operation, form, f"{forward:.3f}", f"{backward:.3f}"]


def losses() -> list[list[str]]:
    """Times the losses with their gradient, which replaces the logits."""
    logits_nV, target_n = random(TOKENS, VOCABULARY), torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    forms: dict[str, Callable[[], object]] = {
        "kernel": lambda: cross_entropy_and_gradient(logits_nV, target_n),
        "plain": lambda: plain_cross_entropy_and_gradient(logits_nV, target_n),
    }
    if has_liger():
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        leaf_nV = logits_nV.detach().requires_grad_()
        forms["liger"] = lambda: LigerCrossEntropyFunction.apply(leaf_nV, target_n, None, -100, 0.0, 0.0, "sum")
    operation = f"loss of {TOKENS:,} x {VOCABULARY:,}"
    return [[operation, form, f"{milliseconds(call):.3f}", "in forward"] for form, call in forms.items()]


def products() -> list[list[str]]:
    found = []
    for tokens in (TOKENS, LAYERS * SEGMENT):
        forms: dict[str, Function] = {"kernel": silu_product, "plain": plain_silu_product}
        if has_liger():
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction

            forms["liger"] = LigerSiLUMulFunction.apply
        inputs = [random(tokens, INTERMEDIATE) for _ in range(2)]
        operation = f"gated product of {tokens:,} x {INTERMEDIATE:,}"
        found += [row(operation, form, function, inputs) for form, function in forms.items()]
    return found


def norms() -> list[list[str]]:
    """Times norms with a weight for each layer of a wave, and with a single weight, as in Liger's norm."""
    hidden_xD, residual_xD = (random(LAYERS * SEGMENT, WIDTH) for _ in range(2))
    weight_mD, weight_D = random(LAYERS, WIDTH), random(WIDTH)
    stacked, single = f"norm of {LAYERS} x {SEGMENT} x {WIDTH:,}", f"norm of {LAYERS * SEGMENT:,} x {WIDTH:,}"
    summed = [hidden_xD, residual_xD, weight_mD]
    found = [
        row(stacked, "kernel", lambda x, w: rms_norm(x, w, EPSILON), [hidden_xD, weight_mD]),
        row(stacked, "plain", lambda x, w: plain_rms_norm(x, w, EPSILON), [hidden_xD, weight_mD]),
        row(f"sum and {stacked}", "kernel", lambda x, y, w: add_rms_norm(x, y, w, EPSILON), summed),
        row(single, "kernel", lambda x, w: rms_norm(x, w, EPSILON), [hidden_xD, weight_D]),
        row(single, "torch", lambda x, w: torch.rms_norm(x, (WIDTH,), w, EPSILON), [hidden_xD, weight_D]),
    ]
    if has_liger():
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return LigerRMSNormFunction.apply(x, w, EPSILON, 0.0, "llama", False)

        found.append(row(single, "liger", liger, [hidden_xD, weight_D]))
    return found


def rotations() -> list[list[str]]:
    tables = random(1, 1, SEGMENT, HEAD), random(1, 1, SEGMENT, HEAD)
    query_RTHE = random(LAYERS, SEGMENT, HEADS, HEAD)
    operation = f"rotation of {LAYERS} x {HEADS} x {SEGMENT} x {HEAD}"
    forms: dict[str, Function] = {"kernel": rotate, "plain": plain_rotate}
    return [
        row(operation, form, lambda x, function=function: function(x.transpose(1, 2), tables), [query_RTHE])
        for form, function in forms.items()
    ]


def inputs_of_attention() -> list[list[str]]:
    """Times rotated queries, and the keys and values of [memory ; segment], of tensors as projections lay them out."""
    tables = random(1, 1, SEGMENT, HEAD), random(1, 1, SEGMENT, HEAD)
    own = [random(LAYERS, SEGMENT, heads, HEAD) for heads in (HEADS, GROUPS, GROUPS)]
    memory = [random(LAYERS, GROUPS, SEGMENT, HEAD) for _ in range(2)]

    def kernel(query, key, value, *memory):
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        (found,) = attention_inputs(query, key, value, memory, tables)
        return found

    def plain(query, key, value, *memory):
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        own = rotate(key, tables), value
        return rotate(query, tables), *(torch.cat(pair, dim=2) for pair in zip(memory, own, strict=True))

    operation = f"queries, [memory ; segment] of {LAYERS} x {HEADS}, {GROUPS} x {SEGMENT} x {HEAD}"
    return [row(operation, form, function, own + memory) for form, function in (("kernel", kernel), ("plain", plain))]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels: there is no CUDA device.")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(Table("fused kernels", COLUMNS, [*losses(), *products(), *norms(), *rotations(), *inputs_of_attention()]))


if __name__ == "__main__":
    main()
