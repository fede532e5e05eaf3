"""Compares the five properties, each halved."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from condense.eval.intervals import format_interval, interval
from condense.eval.results import Table, run_metadata
from condense.eval.runner import Results

from .grid import CONTROL, MODELS, PROPERTIES, is_halved, is_seen_by_loss

ABOUT = (
    "The relative change of the validation loss if a property is halved, against the unablated model of the same seed. "
    "The halves have no common unit: the ranks say which of these ablations costs more, not which property matters "
    "more. Rank 1 has the largest cost; properties whose 95 % intervals overlap share a range of ranks. The loss of "
    "the diffusion model does not see its number of steps, which has no rank; the Fréchet distance of its samples "
    "does. The variant `fresh` is a control that chooses the missing targets anew each time."
)


def summarize(results: dict[str, Results]) -> Results:
    """Returns the summary of the properties, from their results by name."""
    rows = []
    for name, found in results.items():
        for model in MODELS:
            halved = [value for value in found["values"] if value["model"] == model and is_halved(value["level"])]
            for value in halved:
                mean, low, high = interval(value["change"])
                at_equal, *_ = interval(value["change_at_equal_operations"])
                row = {"property": name, "model": model, "variant": value["variant"], "change": mean,
                       "low": low, "high": high, "change_at_equal_operations": at_equal,
                       "is_main": value is halved[0]}  # fmt: skip
                if "frechet_difference" in value:
                    row["frechet_difference"] = interval(value["frechet_difference"])
                rows.append(row)
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model and row["is_main"]]
        ranked = [row for row in mine if is_seen_by_loss(row["property"], model)]
        for row in ranked:
            row["ranks"] = _ranks(row, ranked)
    seeds = min(found["seeds"] for found in results.values())
    return {"kind": "ablation", **run_metadata(), "about": ABOUT, "seeds": seeds, "rows": rows}


def tables(results: Results) -> list[Table]:
    """Returns the properties side by side, sorted by their ranks, and a table of all ways to halve them."""
    columns = ["property, halved"]
    columns += [text for model in MODELS for text in (f"{model}: rank", "change [%]", "worst variant [%]")]
    by_place = {(row["property"], row["model"]): row for row in results["rows"] if row["is_main"]}

    def mean_rank(name: str) -> float:
        ranks = [row["ranks"] for model in MODELS if "ranks" in (row := by_place[name, model])]
        return fmean(sum(first_and_last) for first_and_last in ranks)

    rows = []
    for name in sorted(PROPERTIES, key=mean_rank):
        cells = []
        for model in MODELS:
            row = by_place[name, model]
            cells += [_rank(row), _change(row), _worst(row, results["rows"])] if "ranks" in row else ["-"] * 3
        rows.append([name.replace("_", " "), *cells])
    others = [
        [row["property"].replace("_", " "), row["model"], row["variant"] or "-", _change(row),
         f"{100 * row['change_at_equal_operations']:.1f}",
         format_interval(row["frechet_difference"], ".3f") if "frechet_difference" in row else "-"]
        for row in results["rows"]
    ]  # fmt: skip
    return [
        Table("what it costs to halve each property", columns, rows),
        Table("every way to halve it", ["property", "model", "variant", "change [%]", "at equal operations [%]",
                                        "Fréchet distance, difference"], others),
    ]  # fmt: skip


def _ranks(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Returns the first and the last rank that the intervals allow; equal ranks for values without intervals."""

    def bounds(one: dict[str, Any]) -> tuple[float, float]:
        return (one["change"], one["change"]) if one["low"] is None else (one["low"], one["high"])

    low, high = bounds(row)
    above = sum(bounds(other)[0] > high for other in rows)
    below = sum(bounds(other)[1] < low for other in rows)
    return above + 1, len(rows) - below


def _rank(row: dict[str, Any]) -> str:
    first, last = row["ranks"]
    return f"{first}" if first == last else f"{first}-{last}"


def _change(row: dict[str, Any]) -> str:
    return format_interval((row["change"], row["low"], row["high"]), ".1f", unit=100)


def _worst(main: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Formats the costliest of the other variants, if it costs more than the main one."""
    place = main["property"], main["model"]
    others = [row for row in rows if (row["property"], row["model"]) == place and row["variant"] != CONTROL]
    worst = max(others, key=lambda row: row["change"])
    return "-" if worst["is_main"] else f"{worst['variant']}: {_change(worst)}"
