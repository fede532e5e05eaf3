"""Where attention goes: scores before softmax over [segment before ; current], and how much falls on the former.

For a folded model the segment before is its memory, and all that it sees; a stock Llama sees everything earlier
too, which is reported beside it. Layers and segments count from 0, so segment s has s segments before it. The
paper counts from 1: what its figure 10 calls segments 2-3 is segment 2 here.

Axes: H query heads, T queries (the tokens of a segment), k keys of two segments, N tokens.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from .attention_scores import mass, queries_and_keys, scaled_map, scores
from .models import Subject, load_subjects
from .records import open_records
from .results import Table, circumstances, picture, write_results
from .windows import read_texts

SEGMENTS = (2, 4, 6)  # those of figure 10
BINS = 32  # of the position in the segment, where it is drawn


def attention(
    models: Sequence[str],
    output: Path,
    text: str,
    layers: Sequence[int] | None = None,
    segments: Sequence[int] = SEGMENTS,
    heads: Sequence[int] = (),
    segment_length: int = 512,
    text_field: str = "text",
    dtype: str = "auto",
    attention: str = "auto",
) -> dict[str, Any]:
    """Measures models (folders or hub ids, `NAME=FOLDER` for a name); writes output/attention.* and attention_mass.*.

    `text` is a file or glob pattern (.txt, .jsonl, .parquet), whose first document that is long enough is read.
    `layers` None: the first, the middle and the last. Each of `heads` gets maps of its own beside the average over
    all. `segment_length` is for stock models; a folded one has its own. Called again, it goes on behind the models
    that are done.
    """
    subjects = load_subjects(list(models), dtype, attention)
    lengths = {subject.name: subject.segment_length or segment_length for subject in subjects}
    texts = {}
    for subject in subjects:
        _check(subject, layers or [], segments, heads)
        texts[subject.name] = _long_enough(
            read_texts(subject.tokenizer, [text], text_field=text_field), (max(segments) + 1) * lengths[subject.name]
        )
    settings = {
        "models": [subject.describe() for subject in subjects],
        "text": text,
        "sha256": {name: hashlib.sha256(ids_N.numpy().tobytes()).hexdigest() for name, ids_N in texts.items()},
        "layers": layers and list(layers),
        "segments": list(segments),
        "heads": list(heads),
        "segment_lengths": lengths,
        "attention": attention,
    }
    masses, maps = list[dict[str, Any]](), list[dict[str, Any]]()
    with open_records(output / "attention.records.jsonl", settings) as records:
        for subject in tqdm(subjects, unit="model", desc="attention"):
            name = subject.name

            def measure(subject=subject, name=name) -> dict[str, Any]:
                return measure_attention(subject, texts[name], layers, segments, heads, lengths[name])

            record = records.get({"model": name}, measure)
            masses += [{"model": name, **one} for one in record["masses"]]
            maps += [{"model": name, **one} for one in record["maps"]]
        results = {"kind": "attention", **circumstances(), **settings, "masses": masses, "maps": maps}
        plain = [{field: value for field, value in one.items() if not isinstance(value, list)} for one in masses]
        write_results(output / "attention", results, plain)
        draw(results, output / "attention")
        draw_mass(results, output / "attention_mass")
    return results


def _long_enough(texts: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """The first tokens of the first text that has so many."""
    for ids_N in texts:
        if len(ids_N) >= num_tokens:
            return ids_N[:num_tokens]
    raise ValueError(
        f"the longest of {len(texts)} texts has {max(map(len, texts))} tokens, and the last of the segments ends at "
        f"{num_tokens}: pass a longer text, or earlier or shorter segments."
    )


def measure_attention(
    subject: Subject,
    ids_N: torch.Tensor,
    layers: Sequence[int] | None = None,
    segments: Sequence[int] = SEGMENTS,
    heads: Sequence[int] = (),
    segment_length: int = 512,
) -> dict[str, Any]:
    """`masses` of every layer and segment, and `maps` of the chosen layers and segments.

    A mass is the share of the softmax's weight that falls on the segment before (`on_previous`) and on all earlier
    ones (`on_earlier`), averaged over heads and queries; `by_head` [H] and `by_position` [T] are of the former, and
    `uniform` [T] is what it were if all visible keys weighed the same. A map's `scores` [T, 2T] are those of one
    head, or averaged over all (`head` None), scaled to 0 ... 1 over what is visible; None is hidden. Of segments
    longer than 128 tokens, scores are averaged in blocks of `block` x `block` tokens.

    Raises `ValueError` for layers, heads and segments that there are none of, and for the first segment, which has
    no memory.
    """
    config, length = subject.model.config, subject.segment_length or segment_length
    last = config.num_hidden_layers - 1
    layers = sorted({0, last // 2, last}) if layers is None else layers
    _check(subject, layers, segments, heads)
    ids_N = _long_enough([ids_N], (max(segments) + 1) * length)
    every_layer = range(config.num_hidden_layers)
    found = queries_and_keys(subject.model, ids_N, length, every_layer, segments)
    masses, maps = [], []
    for layer in every_layer:
        for segment in segments:
            about = {"layer": layer, "segment": segment}
            score_HTK = scores(*found[layer, segment])
            masses.append({**about, **mass(score_HTK)})
            if layer in layers:
                pair_HTk = score_HTK[:, :, -2 * length :]
                maps.append({**about, "head": None, **scaled_map(pair_HTk.mean(0))})
                maps += [{**about, "head": head, **scaled_map(pair_HTk[head])} for head in heads]
    return {"masses": masses, "maps": maps}


def _check(subject: Subject, layers: Sequence[int], segments: Sequence[int], heads: Sequence[int]) -> None:
    config = subject.model.config
    if config.model_type not in ("condense_llama", "llama"):
        raise ValueError(f"{subject.name} is a {config.model_type!r}: maps are made of folded models and of Llamas.")
    counts = {"layer": (layers, config.num_hidden_layers), "head": (heads, config.num_attention_heads)}
    for what, (chosen, count) in counts.items():
        if wrong := [number for number in chosen if not 0 <= number < count]:
            raise ValueError(f"{subject.name} has no {what} {wrong[0]}: it has {count}, counted from 0.")
    if not segments or min(segments) < 1:
        raise ValueError(f"segments {list(segments)}: segment 0 is the first and has no memory; choose from 1 on.")


def tables(results: dict[str, Any]) -> list[Table]:
    """The mass on the segment before; for stock models also on all earlier ones. A line per layer."""
    found = []
    for model in results["models"]:
        length = results["segment_lengths"][model["name"]]
        masses = [one for one in results["masses"] if one["model"] == model["name"]]
        by_place = {(one["layer"], one["segment"]): one for one in masses}
        kinds = {"on_previous": "memory" if model["segment_length"] else "the segment before"}
        if not model["segment_length"]:
            kinds["on_earlier"] = "all earlier ones"
        columns = ["layer", *(f"segment {s}: % on {kind}" for s in results["segments"] for kind in kinds.values())]
        rows = []
        for layer in dict.fromkeys(one["layer"] for one in masses):
            places = [by_place[layer, segment] for segment in results["segments"]]
            rows.append([layer, *(f"{100 * place[kind]:.1f}" for place in places for kind in kinds)])
        # The last line: what it were if all visible keys weighed the same.
        evenly = {("on_previous", s): f"{100 * np.mean(by_place[0, s]['uniform']):.1f}" for s in results["segments"]}
        rows.append(["even", *(evenly.get((kind, s), "") for s in results["segments"] for kind in kinds)])
        title = f"{model['name']}: where the attention of segments of {length} tokens goes ('even': all keys the same)"
        found.append(Table(title, columns, rows))
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """The maps: a row per model and segment, a column per layer and head; a line parts the two segments."""
    rows = [(model, segment) for model in results["models"] for segment in results["segments"]]
    columns = list(dict.fromkeys((one["layer"], one["head"]) for one in results["maps"]))
    by_place = {(one["model"], one["segment"], one["layer"], one["head"]): one for one in results["maps"]}
    size = (0.6 + 4.1 * len(columns), 0.4 + 2.4 * len(rows))
    with picture(path, rows=len(rows), columns=len(columns), figsize=size, squeeze=False) as panels:
        for (model, segment), row in zip(rows, panels, strict=True):
            for (layer, head), axes in zip(columns, row, strict=True):
                one = by_place.get((model["name"], segment, layer, head))
                if one is None:  # a model with fewer layers
                    axes.axis("off")
                    continue
                image = _draw_map(axes, one, results["segment_lengths"][model["name"]])
                which = "mean of heads" if head is None else f"head {head}"
                axes.set_title(f"{model['name']}: layer {layer}, {which}", fontsize=9)
                before = "memory" if model["segment_length"] else "before"
                axes.set_xlabel(f"segment {segment - 1} ({before})  |  segment {segment} (current)", fontsize=8)
            row[0].set_ylabel(f"queries of segment {segment}", fontsize=8)
        bar = panels[0, 0].figure.colorbar(image, ax=panels, shrink=0.6, aspect=30, pad=0.01)
        bar.set_label("score before softmax, scaled by map", fontsize=8)


def _draw_map(axes: Any, one: dict[str, Any], length: int) -> Any:
    cells = np.array(one["scores"], dtype=float)  # None becomes NaN, which stays white
    image = axes.imshow(
        cells, vmin=0, vmax=1, cmap="viridis", extent=(0, 2 * length, length, 0), interpolation="nearest"
    )
    axes.axvline(length, color="white", linewidth=2.5)
    axes.axvline(length, color="crimson", linewidth=1)
    axes.tick_params(labelsize=7)
    return image


def draw_mass(results: dict[str, Any], path: Path) -> None:
    """The mass on the segment before, by layer and by position of the query; a row of panels per model."""
    models = results["models"]
    with picture(path, rows=len(models), columns=2, figsize=(11, 3.8 * len(models)), squeeze=False) as panels:
        for (left, right), model in zip(panels, models, strict=True):
            name, length = model["name"], results["segment_lengths"][model["name"]]
            masses = [one for one in results["masses"] if one["model"] == name]
            _draw_by_layer(left, masses, results["segments"])
            shown = sorted({one["layer"] for one in results["maps"] if one["model"] == name})
            _draw_by_position(right, masses, shown, length)
            what = "the memory" if model["segment_length"] else "the segment before"
            for axes in (left, right):
                axes.set_ylabel(f"% of attention on {what}")
                axes.set_ylim(0, 100)
                axes.grid(alpha=0.3)
                axes.legend(fontsize=8)
            left.set_title(f"{name}: by layer", fontsize=10)
            right.set_title(f"{name}: by position, mean of the segments", fontsize=10)


def _draw_by_layer(axes: Any, masses: Sequence[dict[str, Any]], segments: Sequence[int]) -> None:
    for number, segment in enumerate(segments):
        chosen = [one for one in masses if one["segment"] == segment]
        layers, color = [one["layer"] for one in chosen], f"C{number}"
        axes.plot(
            layers,
            [100 * one["on_previous"] for one in chosen],
            marker="o",
            markersize=4,
            color=color,
            label=f"segment {segment}",
        )
        if chosen[0]["on_earlier"]:
            earlier = [100 * one["on_earlier"] for one in chosen]
            axes.plot(layers, earlier, linestyle=":", color=color, label=f"segment {segment}: on all earlier ones")
    evenly = {100 * np.mean(one["uniform"]) for one in masses}
    if len(evenly) == 1:  # a stock model's depend on how much came before
        axes.axhline(evenly.pop(), color="0.35", linestyle="--", linewidth=1.2, label="if all keys weighed the same")
    axes.set_xlabel("layer")
    axes.set_xticks(layers if len(layers) <= 16 else layers[:: len(layers) // 8])


def _draw_by_position(axes: Any, masses: Sequence[dict[str, Any]], layers: Sequence[int], length: int) -> None:
    size = -(-length // BINS)
    starts = np.arange(0, length, size)
    middle = starts + (np.minimum(starts + size, length) - starts - 1) / 2

    def binned(values: Sequence[Sequence[float]]) -> list[float]:
        by_position_T = 100 * np.mean(values, axis=0)
        return [by_position_T[start : start + size].mean() for start in starts]

    for layer in layers:
        chosen = [one["by_position"] for one in masses if one["layer"] == layer]
        axes.plot(middle, binned(chosen), linewidth=1.2, label=f"layer {layer}")
    even = binned([one["uniform"] for one in masses])
    axes.plot(middle, even, color="0.35", linestyle="--", linewidth=1.2, label="if all keys weighed the same")
    axes.set_xlabel("position of the query in its segment [tokens]")
