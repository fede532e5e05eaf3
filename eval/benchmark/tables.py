"""Shared parts of the tables and pictures of both grids."""

from collections.abc import Sequence
from typing import Any

from ..results import Table, groups_of
from .cases import WITHOUT_SEGMENTS

MODE_NAMES = {"training": "training step", "prefill": "prefill", "decoding": "new token"}
SHAPE = {  # fields of a config.json, by the names of their columns
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "MLP size": "intermediate_size",
    "heads": "num_attention_heads",
    "key/value heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}


def label(point: dict[str, Any]) -> str:
    """Returns the name of a point's model in tables and pictures; points of earlier versions all have one shape."""
    if "label" in point:
        return point["label"]
    name = point["kind"].replace("_", " ")
    if point["kind"] == "folded":
        return f"{name}, segment {point['segment_length']}"
    return name if point["kind"] in WITHOUT_SEGMENTS else f"{name} {2 * point['segment_length']}"


def model_table(results: dict[str, Any]) -> list[Table]:
    """Returns a table of the models: their shapes, parameters and dtype."""
    models = results.get("models") or [{"name": "Llama", "model_type": "llama", "shape": results.get("shape", {})}]
    columns = ["model", "type", "weights", "parameters", *SHAPE, "dtype", "weights [MiB]"]
    rows = []
    for model in models:
        points = [point for point in results["points"] if point.get("model") in (None, model["name"])]
        known: dict[str, Any] = next((point for point in points if point.get("parameters")), {})
        row = [model["name"], model["model_type"], model.get("checkpoint") or "random"]
        row += [_whole(known.get("parameters")), *(_whole(model["shape"].get(field)) for field in SHAPE.values())]
        sizes = [point["weight_bytes"] for point in points if "weight_bytes" in point]
        rows.append([*row, known.get("dtype", "-"), f"{sizes[0] / 2**20:,.2f}" if sizes else "-"])
    return [Table("models", columns, rows)]


def _whole(number: int | None) -> str:
    return "-" if number is None else f"{number:,}" if isinstance(number, int) else str(number)


def failure(point: dict[str, Any]) -> str | None:
    """Returns the reason if a point has no figures; else None."""
    return "OOM" if point["out_of_memory"] else point.get("not_measured")


def workload(shared: dict[str, Any], name: str = "training step") -> str:
    """Describes the settings that all points of a table share."""
    checkpoints = ", gradient checkpointing" if shared["checkpointing"] else ""
    step = " with AdamW" if shared["optimizer"] else ""
    return f"{name}{step}, batch {shared['batch']}, attention {shared['attention']}{checkpoints}"


def group_by(points: Sequence[dict[str, Any]], *names: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Groups points that agree in these fields, with the fields; fields missing in earlier versions are None."""
    every = [dict.fromkeys(names) | point for point in points]
    return [(dict(zip(names, key, strict=True)), group) for key, group in groups_of(every, *names).items()]


def token_axis(axes: Any, points: Sequence[dict[str, Any]]) -> None:
    """Makes the horizontal axis logarithmic in tokens, with the lengths of the points as its ticks."""
    ticks = sorted({point["length"] for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick // 1024} K" if tick % 1024 == 0 else f"{tick:,}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("tokens", fontsize=8)
