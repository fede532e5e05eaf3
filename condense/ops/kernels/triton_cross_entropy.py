"""The kernel of `cross_entropy`: one program for each row of logits.

Axes: n target tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl

BLOCK = 8192  # logits of a row at a time


def cross_entropy(logits_nV: torch.Tensor, target_n: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    """Returns the losses [n] in float32; writes the gradient over the logits if it is needed."""
    num_rows, vocabulary = logits_nV.shape
    losses_n = logits_nV.new_empty(num_rows, dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    with torch.cuda.device_of(logits_nV):
        _cross_entropy[(num_rows,)](
            logits_nV,
            target_n,
            losses_n,
            logits_nV.stride(0),
            VOCABULARY=vocabulary,
            NEEDS_GRADIENT=needs_gradient,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return losses_n


@triton.jit
def _cross_entropy(
    logits,
    target,
    losses,
    row_stride,
    VOCABULARY: tl.constexpr,
    NEEDS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    columns = tl.arange(0, BLOCK)

    # Read before any logit is overwritten: the reductions below wait for all threads. Never load an invalid target.
    goal = tl.load(target + row)
    exists = (goal >= 0) & (goal < VOCABULARY)
    of_target = tl.load(logits + goal, mask=exists, other=float("nan")).to(tl.float32)

    maximum = float("-inf")
    total = 0.0
    for start in range(0, VOCABULARY, BLOCK):
        column = start + columns
        logit = tl.load(logits + column, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(maximum, tl.max(logit, axis=0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # so far all are -inf, and their difference is NaN
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(logit - shift), axis=0)
        maximum = larger
    tl.store(losses + row, tl.log(total) - (of_target - maximum))

    if NEEDS_GRADIENT:
        scale = 1.0 / total
        for start in range(0, VOCABULARY, BLOCK):
            column = start + columns
            inside = column < VOCABULARY
            logit = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(logit - maximum) * scale
            gradient = tl.where(column == goal, gradient - 1.0, gradient)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)
