"""The memory to fold a checkpoint with, by what folding costs before any training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from condense.hub.untrained import STABLE_SHARE
from condense.utils.memory_options import parse_share

from .fold_arms import LOWEST, NONE, WINDOW

LATE = 0.25  # the share of a text's tokens, at its end, that shows a divergence
MARGIN = 0.5  # nats a token above no memory at all
TRAINABLE = "0.2"
SEGMENTS = 16  # of a text that shows whether share 1 diverges
TOLERANCE = 0.1  # nats a token that a memory which can be trained may cost more
RULE = (
    f"The least cost among the folds that don't diverge. A fold diverges if its loss over the last {LATE:.0%} of a "
    f"text is more than {MARGIN} nats a token above that of no memory. Share 0 gives way to share {TRAINABLE} if that "
    f"costs at most {TOLERANCE} nats more: only a memory with a part of the layer's output can be trained to reach any "
    f"number of segments. Shares above {STABLE_SHARE} need a text of {SEGMENTS} segments: they diverge late."
)


Cost = dict[str, Any]


def late_excess(loss_N: np.ndarray, without_memory_N: np.ndarray) -> float:
    """Returns by how much the loss at a text's end is above that of no memory, on the same tokens."""
    late = max(1, round(LATE * len(loss_N)))
    return float((loss_N - without_memory_N)[-late:].mean())


def is_fold(cost: Cost) -> bool:
    return cost["memory"] not in (NONE, WINDOW)


def diverges(cost: Cost) -> bool:
    return is_fold(cost) and cost["late"] > MARGIN


def shows_divergence(cost: Cost) -> bool:
    """Returns whether a text was long enough to show it. Shares up to 0.8 and single layers cost at most a little."""
    share = parse_share(cost["memory"]) if cost["memory"] != LOWEST else 0
    lowest = min(share) if isinstance(share, list) else share
    return lowest <= STABLE_SHARE or cost["read"] >= SEGMENTS * cost["segment_length"]


def choose(costs: Sequence[Cost], memory: str | None = None, sink: bool | None = None) -> tuple[Cost, str]:
    """Returns the cost of the fold to take, and why, in one or two sentences.

    A given `memory`, or presence of a `sink`, is kept.
    """
    folds = [
        cost for cost in filter(is_fold, costs) if memory in (None, cost["memory"]) and sink in (None, cost["sink"])
    ]
    stable = [cost for cost in folds if not diverges(cost)]
    stable = [cost for cost in stable if shows_divergence(cost)] or stable
    best = min(stable or folds, key=lambda cost: cost["cost"])
    if len(folds) == 1:
        return best, "It was given." if stable else "It was given. It diverges: train it before use."
    if not stable:
        return best, "All folds diverge, and it costs least: train it before use, or take longer segments."
    for cost in stable if best["memory"] == "0" else ():
        if (cost["memory"], cost["sink"]) == (TRAINABLE, best["sink"]) and cost["cost"] <= best["cost"] + TOLERANCE:
            saved = cost["cost"] - best["cost"]
            return cost, (
                f"It can be trained to reach any number of segments. Without training, share 0 costs {saved:.3f} nats "
                "a token less, and reaches back a segment for each layer."
            )
    return best, "It costs least" + (
        " of the folds that are known not to diverge." if len(stable) < len(folds) else "."
    )
