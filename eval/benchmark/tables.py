"""Parts that the tables and pictures of both grids share."""

import json
from collections.abc import Sequence
from typing import Any


def group_by(points: Sequence[dict[str, Any]], *names: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Points that agree in these fields, with the fields they share; None for those that earlier versions lack."""
    found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for point in points:
        shared = {name: point.get(name) for name in names}
        found.setdefault(json.dumps(shared), (shared, []))[1].append(point)
    return list(found.values())


def token_axis(axes: Any, points: Sequence[dict[str, Any]]) -> None:
    """A horizontal axis of tokens in powers of two, with the lengths of the points as its ticks."""
    ticks = sorted({point["length"] for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024} K" if tick % 1024 == 0 else f"{tick:,}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("tokens", fontsize=8)
