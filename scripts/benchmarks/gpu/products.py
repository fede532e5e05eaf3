"""Times products as in a folded model's training: of one segment, and of the layers of a diagonal together.

These are all kinds of products of the 1.2 B shape and the gradients of their weights: in bfloat16, and added to a sum
in float32 by the product itself or by a separate addition. The rate of a wider product shows what width costs.
"""

import statistics
from collections.abc import Callable

import torch

from condense.eval.benchmark.timing import free_memory, seconds_of
from condense.ops.products import add_products

from .session import Session, log

ROUNDS = 10  # calls of a sample


def products(session: Session) -> None:
    shape, tokens, layers = session.sizes.large, session.sizes.segment, session.sizes.large["num_hidden_layers"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    _check_sum(session, hidden, inner, tokens)
    for count, width in ((1, tokens), (4, tokens), (layers, tokens), (1, 4 * tokens), (1, 8 * tokens)):
        for out, into in ((inner, hidden), (hidden, inner), (hidden // 4, hidden)):
            _measure(session, count, width, out, into)
        free_memory()


def _check_sum(session: Session, hidden: int, inner: int, tokens: int) -> None:
    torch.manual_seed(0)
    with session.device:
        left, right = torch.randn(2, inner, tokens), torch.randn(2, tokens, hidden)
        total = torch.randn(2, inner, hidden)
    left, right = left.to(session.dtype), right.to(session.dtype)
    expected = total.double() + left.double() @ right.double()
    add_products(total, left, right)
    distance = float((total - expected).norm() / expected.norm())
    session.check("a product added to a float32 sum", distance < 1e-5, f"distance {distance:.1e}")
    log(f"  a product added to a float32 sum: distance {distance:.1e}")


def _measure(session: Session, count: int, width: int, out: int, into: int) -> None:
    with session.device:
        given = torch.randn(count, width, into).to(session.dtype)
        weight = torch.randn(count, out, into).to(session.dtype)
        gradient = torch.randn(count, width, out).to(session.dtype)
        total, rounded = torch.zeros(count, out, into), torch.zeros(count, out, into).to(session.dtype)
    turned = gradient.transpose(1, 2)
    kinds: dict[str, Callable[[], object]] = {
        "output": lambda: torch.bmm(given, weight.transpose(1, 2)),
        "gradient of the input": lambda: torch.bmm(gradient, weight),
        "gradient of the weight": lambda: torch.bmm(turned, given),
        "gradient of the weight, added in bfloat16": lambda: rounded.baddbmm_(turned, given),
        "gradient of the weight, added in float32": lambda: add_products(total, turned, given),
        "gradient of the weight, then an addition in float32": lambda: total.add_(torch.bmm(turned, given)),
    }
    operations = 2 * count * width * out * into
    for name, call in kinds.items():

        def rounds(call: Callable[[], object] = call) -> None:
            for _ in range(ROUNDS):
                call()

        rounds()
        seconds = statistics.median(seconds_of(rounds) for _ in range(session.sizes.repeats)) / ROUNDS
        point = {
            "row": f"product, {name}", "part": session.part, "mode": "product", "length": width, "batch": count,
            "kind": f"{out} x {into}", "seconds": seconds, "teraflops": operations / seconds / 1e12,
        }  # fmt: skip
        session.points.append(point)
        log(f"  {count} x {width} tokens, {out} x {into}, {name}: {1e6 * seconds:,.0f} us, {point['teraflops']:,.0f} T")
