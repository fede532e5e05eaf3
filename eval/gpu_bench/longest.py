"""The longest text that a training step fits for: forward and backward pass with gradient checkpointing.

Multiples of a first length, doubled until one does not fit, then halved steps between; as far as time goes.
"""

from typing import Any

from .bars import LONGEST_BAR
from .race import Bench, Variant, attempt, build_models, configure, free, own_bytes, say, train

BISECTIONS = 2
STOCK_SHARE = 0.35  # of the time that is left


def longest(bench: Bench) -> None:
    """Stock and folded model of the 1.2 B shape, each alone on the device."""
    sizes = bench.sizes
    stock = _search(bench, Variant("stock", checkpointing=True), sizes.longest_first, STOCK_SHARE * bench.left(), 4)
    # At the bar first: what it takes to get there by doubling is better spent beyond it.
    first = LONGEST_BAR * (stock["longest"] or sizes.longest_first)
    variant = Variant("folded", "sdpa", sizes.segment, "sequential", checkpointing=True)
    _search(bench, variant, min(first, sizes.longest_cap), bench.left(), 2)


def _search(bench: Bench, variant: Variant, first: int, seconds: float, growth: int) -> dict[str, Any]:
    """Adds and returns a point whose `longest` fitted and whose `failed` did not; None where neither is known.

    `growth` is by how much the time of a text grows with twice its length, at most.
    """
    end = bench.left() - seconds  # of the bench's time, what is to be left
    model = build_models(bench, bench.sizes.large, [variant.kind])[variant.kind]
    configure(model, variant)
    tried: dict[int, dict[str, Any]] = {}
    fits, fails, length, bisections = 0, 0, first, 0
    while True:
        expected = growth * max(((trial["seconds"] or 0.0) for trial in tried.values()), default=0.0)
        if bench.left() - expected < end or length > bench.sizes.longest_cap or bisections > BISECTIONS:
            break
        tried[length] = trial = _try(bench, model, length)
        say(f"  {variant.kind}, {length:,} tokens: {trial}")
        if trial["seconds"] is None:
            fails = length
        else:
            fits = length
        if not fails:
            length = 2 * fits
        elif not fits:
            length = fails // 2
            if length < bench.sizes.segment:
                break
        else:
            bisections += 1
            length = (fits + fails) // 2
    point = {
        "row": "longest training text",
        "part": bench.part,
        "mode": "longest",
        "batch": 1,
        **vars(variant),
        "longest": fits or None,
        "failed": fails or None,
        "before_bytes": own_bytes(model),
        "memory_is": bench.memory.description,
        "tried": tried,
    }
    bench.points.append(point)
    del model
    free(bench)
    return point


def _try(bench: Bench, model: Any, length: int) -> dict[str, Any]:
    free(bench)
    ids_BN = bench.random_ids(model, 1, length)
    bench.memory.restart()
    seconds = attempt(bench, lambda: train(model, ids_BN))
    peak = bench.memory.peak()
    model.zero_grad(set_to_none=True)
    return {"seconds": seconds, "peak_bytes": peak}
