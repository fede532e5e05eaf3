"""Compares the loss of a chunk with torch's fused `linear_cross_entropy`: value, gradients, time and peak memory.

Axes: D hidden size, V vocabulary, n target tokens.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from condense.eval.benchmark.timing import free_memory, seconds_of
from condense.loss import max_tokens
from condense.loss_gradient import head_gradients

from .session import Session, log

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # for sums and gradients, relative to the largest


def losses(session: Session) -> None:
    """Measures two chunks of the large shape, each a segment, forward and backward, with the head's whole gradient."""
    name = "the loss of two chunks beside linear_cross_entropy"
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        session.check(name, None, f"torch {torch.__version__} has no linear_cross_entropy in blocks")
        return
    shape, segment = session.sizes.large, session.sizes.segment
    torch.manual_seed(0)
    with session.device:
        head = torch.nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False).to(session.dtype)
        hidden_nD = torch.randn(2, segment, shape["hidden_size"]).to(session.dtype).requires_grad_()
        target_n = torch.randint(shape["vocab_size"], (2, segment))

    def ours() -> torch.Tensor:
        gradients = head_gradients(head)
        assert gradients is not None
        chunks, at_once = zip(hidden_nD, target_n, strict=True), max_tokens(shape["vocab_size"])
        return gradients.total([gradients.block_loss(*chunk, at_once)[0] for chunk in chunks])

    def fused(options: Any) -> torch.Tensor:
        losses_n = [
            F.linear_cross_entropy(hidden, head.weight, target, reduction="none", options=options)
            for hidden, target in zip(hidden_nD, target_n, strict=True)
        ]
        return torch.stack(losses_n).sum(dtype=torch.float32)

    value, gradients, note = _measure(session, ours, head, hidden_nD)
    tolerance = TOLERANCE[session.dtype]
    for label, options in (("whole", None), ("in blocks", torch.nn.LinearCrossEntropyOptions())):
        other, others, other_note = _measure(session, partial(fused, options), head, hidden_nD)
        same = abs(value - other) <= tolerance * abs(value) and all(
            (one - two).abs().max() <= tolerance * one.abs().max() for one, two in zip(gradients, others, strict=True)
        )
        compared = f"ours {note}; linear_cross_entropy, {label}, {other_note}"
        session.check(f"{name}, {label}", bool(same), compared)
        log(f"  {compared}")


def _measure(
    session: Session, function: Callable[[], torch.Tensor], head: torch.nn.Linear, hidden_nD: torch.Tensor
) -> tuple[float, list[torch.Tensor], str]:
    """Returns the value, its gradients, and a note with the median time and the increase of peak memory."""
    values: list[float] = []

    def call() -> None:
        head.zero_grad(set_to_none=True)
        hidden_nD.grad = None
        total = function()
        total.backward()
        values.append(total.item())

    call()
    free_memory()
    before = session.memory.now()
    session.memory.restart()
    seconds = statistics.median(seconds_of(call) for _ in range(session.sizes.repeats))
    peak = session.memory.peak() - before
    assert head.weight.grad is not None and hidden_nD.grad is not None
    gradients = [head.weight.grad.float(), hidden_nD.grad.float()]
    return values[-1], gradients, f"{1000 * seconds:,.2f} ms, {peak / 2**20:,.0f} MiB"
