"""Finds the longest text whose training step fits: forward and backward pass with gradient checkpointing.

The search doubles a first length until a text does not fit, and then bisects, as long as there is time.
"""

from dataclasses import asdict
from typing import Any

from condense.eval.benchmark.cases import ModelVariant
from condense.eval.benchmark.models import configure, parameter_bytes
from condense.eval.benchmark.timing import attempt, free_memory
from condense.eval.benchmark.workloads import random_ids, training_step

from .bars import LONGEST_BAR
from .parts import raced
from .session import Session, build_models, log

BISECTIONS = 2
STOCK_SHARE = 0.35  # the stock model's share of the remaining time


def longest(session: Session) -> None:
    """Measures the stock and the folded model of the 1.2 B shape, one at a time on the device."""
    sizes = session.sizes
    variant = ModelVariant(kind="stock", checkpointing=True)
    stock = _search(session, variant, sizes.longest_first, STOCK_SHARE * session.seconds_left(), 4)
    # The folded model begins at the bar: the time for doubling up to it is better spent beyond it.
    first = LONGEST_BAR * (stock["longest"] or sizes.longest_first)
    schedules = [variant.schedule for variant in raced(session, [sizes.segment])]
    schedule = "graph" if "graph" in schedules else "sequential"  # by single segments, which need the least memory
    variant = ModelVariant(kind="folded", segment_length=sizes.segment, schedule=schedule, checkpointing=True)
    _search(session, variant, min(first, sizes.longest_cap), session.seconds_left(), 2)


def _search(session: Session, variant: ModelVariant, first: int, seconds: float, growth: int) -> dict[str, Any]:
    """Adds and returns a point with the `longest` length that fitted and a `failed` one that did not; None if unknown.

    A text of twice the length takes at most `growth` times as long.
    """
    end = session.seconds_left() - seconds  # seconds that this search must leave
    model = build_models(session, session.sizes.large, [variant.kind])[variant.kind]
    configure(model, variant)
    tried: dict[int, dict[str, Any]] = {}
    fits, fails, length, bisections = 0, 0, first, 0
    while True:
        expected = growth * max(((trial["seconds"] or 0.0) for trial in tried.values()), default=0.0)
        no_time = session.seconds_left() - expected < end
        if no_time or length > session.sizes.longest_cap or bisections > BISECTIONS:
            break
        tried[length] = trial = _try(session, model, length)
        log(f"  {variant.kind}, {length:,} tokens: {trial}")
        if trial["seconds"] is None:
            fails = length
        else:
            fits = length
        if not fails:
            length = 2 * fits
        elif not fits:
            length = fails // 2
            if length < session.sizes.segment:
                break
        else:
            bisections += 1
            length = (fits + fails) // 2
    point = {
        "row": "longest training text",
        "part": session.part,
        "mode": "longest",
        "batch": 1,
        **asdict(variant),
        "longest": fits or None,
        "failed": fails or None,
        "before_bytes": parameter_bytes(model),
        "memory_is": session.memory.description,
        "tried": tried,
    }
    session.points.append(point)
    del model
    free_memory()
    return point


def _try(session: Session, model: Any, length: int) -> dict[str, Any]:
    free_memory()
    step = training_step(model, random_ids(model, 1, length))
    session.memory.restart()
    seconds = attempt(step)
    peak_bytes = session.memory.peak()
    model.zero_grad(set_to_none=True)
    return {"seconds": seconds, "peak_bytes": peak_bytes}
