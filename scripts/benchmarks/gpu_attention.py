"""Times attention over [memory ; segment] on a GPU in bfloat16, as one call and as two calls with a merged softmax.

    python -m scripts.benchmarks.gpu_attention OUT.json

cuDNN's kernels have no lower-right causal mask, so torch uses its flash kernels for one call. Two calls need no such
mask: all queries see the memory, and the segment is causal. The two outputs are weighted by their sums of exponentials.
With the total of these sums, each part's backward pass gives its share of the whole gradient. Keys and values of memory
and segment need not be copied together.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from condense.eval.results import Table, run_metadata

from .gpu_kernels import milliseconds

SEGMENT, HEADS, GROUPS, HEAD = 512, 32, 8, 64  # as in the Table I and 1.2 B shapes
ROWS = (1, 2, 4, 8)  # layers of a diagonal, or texts
COLUMNS = ["rows", "form", "forward [ms]", "forward and backward [ms]", "error, output", "error, gradients"]

aten = torch.ops.aten


class Attention(NamedTuple):
    """A kernel.

    `forward(query, key, value, is_causal)` returns the output, the logarithm of the sums of exponentials [R, H, T], and
    `rest`, further arguments of `backward(gradient, query, key, value, output, logsumexp, is_causal, rest)`.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, Any]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _flash_forward(query, key, value, is_causal):
    output, logsumexp, *rest, _ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
    return output, logsumexp, rest


def _flash_backward(gradient, query, key, value, output, logsumexp, is_causal, rest):
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, output, logsumexp, *lengths, 0.0, is_causal, seed, offset
    )


def _cudnn_forward(query, key, value, is_causal):
    found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, is_causal)
    output, logsumexp, *rest, _ = found
    return output, logsumexp.view(output.shape[:3]), rest


def _cudnn_backward(gradient, query, key, value, output, logsumexp, is_causal, rest):
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, output, logsumexp[..., None], seed, offset, None, *lengths, 0.0, is_causal
    )


def _cpu_forward(query, key, value, is_causal):
    output, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    return output, logsumexp, None


def _cpu_backward(gradient, query, key, value, output, logsumexp, is_causal, rest):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logsumexp, 0.0, is_causal
    )


KERNELS = {
    "flash": Attention(_flash_forward, _flash_backward),
    "cuDNN": Attention(_cudnn_forward, _cudnn_backward),
    "cpu": Attention(_cpu_forward, _cpu_backward),
}


class TwoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel: Attention, query, memory_key, memory_value, key, value):
        ctx.kernel = kernel
        of_memory, memory_sum, ctx.memory_rest = kernel.forward(query, memory_key, memory_value, False)
        of_segment, segment_sum, ctx.rest = kernel.forward(query, key, value, True)
        logsumexp_RHT = torch.logaddexp(memory_sum, segment_sum)
        share_RHT1 = (memory_sum - logsumexp_RHT).exp()[..., None]
        segment, memory = (one.to(share_RHT1.dtype) for one in (of_segment, of_memory))
        output = torch.lerp(segment, memory, share_RHT1).to(query.dtype)
        ctx.save_for_backward(query, memory_key, memory_value, key, value, output, logsumexp_RHT)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, memory_key, memory_value, key, value, *whole = ctx.saved_tensors
        of_query, *of_memory = ctx.kernel.backward(
            gradient, query, memory_key, memory_value, *whole, False, ctx.memory_rest
        )
        also_of_query, *of_segment = ctx.kernel.backward(gradient, query, key, value, *whole, True, ctx.rest)
        return None, of_query + also_of_query, *of_memory, *of_segment


def one_call(query, memory_key, memory_value, key, value):
    """Attends as `condense` does: memory and segment are copied together."""
    keys, values = torch.cat([memory_key, key], dim=2), torch.cat([memory_value, value], dim=2)
    mask: Any = causal_lower_right(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def exact(query, memory_key, memory_value, key, value):
    """Attends by the definition, for tensors in float64."""
    keys, values = torch.cat([memory_key, key], dim=2), torch.cat([memory_value, value], dim=2)
    keys, values = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (keys, values))
    visible_TK = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
    visible_TK = visible_TK.tril(keys.shape[2] - query.shape[2])
    scores = (query @ keys.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~visible_TK, -torch.inf)
    return scores.softmax(-1) @ values


def forms_on(device: str) -> dict[str, Callable[..., torch.Tensor]]:
    names = ["cpu"] if device == "cpu" else ["flash", "cuDNN"]
    parts = {f"two calls, {name}": lambda *given, name=name: TwoParts.apply(KERNELS[name], *given) for name in names}
    return {"one call": one_call} | parts


def inputs_of(rows: int, segment: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the query, and keys and values of memory and segment: views of [R, T, H, E], as from projections."""
    torch.manual_seed(0)
    heads = [HEADS, GROUPS, GROUPS, GROUPS, GROUPS]
    made = [torch.randn(rows, segment, count, HEAD, device=device, dtype=dtype) for count in heads]
    return [one.transpose(1, 2).requires_grad_() for one in made]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def errors(form: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Returns the error of the output, and the largest error of a gradient."""
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    found, expected = form(*inputs), exact(*doubles)
    factor = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, factor)
    exact_ones = torch.autograd.grad(expected, doubles, factor.double())
    return relative_error(found, expected), max(map(relative_error, gradients, exact_ones))


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Captures a call as a CUDA graph, as in a captured group of segments, so the host's time does not count."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measured(rows: int) -> list[dict[str, Any]]:
    inputs, found = inputs_of(rows, SEGMENT, "cuda", torch.bfloat16), []
    for name, form in forms_on("cuda").items():
        line: dict[str, Any] = {"rows": rows, "form": name}
        try:
            line["error"], line["gradient_error"] = errors(form, inputs)
            factor = torch.randn_like(form(*inputs))
            line["forward_ms"] = milliseconds(captured(lambda form=form: form(*inputs)))
            both = lambda form=form, factor=factor: torch.autograd.grad(form(*inputs), inputs, factor)  # noqa: E731
            line["both_ms"] = milliseconds(captured(both))
        except RuntimeError as error:  # the kernel refuses these tensors
            line["refused"] = str(error).splitlines()[0]
        found.append(line)
    return found


def table(lines: list[dict[str, Any]]) -> Table:
    def cells(line: dict[str, Any]) -> list[str]:
        if "refused" in line:
            return [line["refused"], "", "", ""]
        times = [f"{line[name]:.3f}" for name in ("forward_ms", "both_ms")]
        return [*times, *(f"{line[name]:.1e}" for name in ("error", "gradient_error"))]

    title = f"{HEADS} heads on {GROUPS}, {HEAD} wide, {SEGMENT} queries, {2 * SEGMENT} keys"
    return Table(title, COLUMNS, [[line["rows"], line["form"], *cells(line)] for line in lines])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m scripts.benchmarks.gpu_attention OUT.json")
    if not torch.cuda.is_available():
        sys.exit("gpu_attention: there is no CUDA device.")
    lines = [line for rows in ROWS for line in measured(rows)]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(table(lines))
    Path(sys.argv[1]).write_text(json.dumps(run_metadata() | {"attention": lines}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
