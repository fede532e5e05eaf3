"""Attention maps: scores before softmax over [segment before ; current], and the share that falls on the former.

For a folded model the segment before is its memory, the only earlier text that it sees; a sink in the memory's first
row has a column of its own. A stock Llama sees all earlier text, whose share is also reported, as is that of the first
token, the sink of many pretrained models. Layers and segments count from 0, so segment s has s segments before it. The
paper counts from 1: layers 1, 8 and 16 of its figure 10 are 0, 7 and 15 here. Its segments 2-3 are segment 2.

Axes: H query heads, T queries (the tokens of a segment), K keys, N tokens.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from condense import CondenseConfig
from condense.families import FAMILIES
from condense.training.data.documents import good_documents, read_documents
from condense.training.data.summarization import prompt_ids

from ..charts import finish
from ..models import EvaluatedModel
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results
from ..tables import key_by, select, table
from .attention_scores import mass, queries_and_keys, scaled_map, scores
from .corpus import NAMES, find_source
from .evaluation import Evaluation, shown_name
from .options import AttentionOptions
from .windows import by_position, read_texts

EVEN = {"color": "0.35", "linestyle": "--", "linewidth": 1.2, "label": "if all keys weighed the same"}


class AttentionMaps(Evaluation[EvaluatedModel]):
    """Measures a whole model per item. `texts` are documents, token ids [N], by the name of the model.

    Raises `ValueError` for layers, heads or segments that a model does not have, for segment 0, which has no memory, or
    if no text is long enough.
    """

    kind = "attention"
    unit = "model"
    Options = AttentionOptions

    def __init__(self, options: AttentionOptions, models: Sequence[EvaluatedModel], texts: dict[str, Any]):
        for model in models:
            _check(model, options)
        super().__init__(options, models)
        self.lengths = {model.name: model.segment_length or options.segment_length for model in models}
        num_segments = max(options.segments) + 1
        self.texts = {name: _long_enough(texts[name], num_segments * self.lengths[name]) for name in self.lengths}

    @classmethod
    def load(cls, options: AttentionOptions) -> "AttentionMaps":
        models = cls.load_models(options)
        for model in models:  # before any text is read
            _check(model, options)
        return cls(options, models, {model.name: _read(model, options) for model in models})

    def settings(self) -> dict[str, Any]:
        digests = {name: hashlib.sha256(ids_N.numpy().tobytes()).hexdigest() for name, ids_N in self.texts.items()}
        return super().settings() | {"sha256": digests, "segment_lengths": self.lengths}

    def items(self) -> Sequence[EvaluatedModel]:
        return self.models

    def num_tokens(self, item: EvaluatedModel) -> int:
        return len(self.texts[item.name])

    def model_of(self, item: EvaluatedModel) -> EvaluatedModel:
        return item

    def key(self, item: EvaluatedModel) -> Key:
        return {"model": item.name}

    def measure(self, item: EvaluatedModel) -> Record:
        """Returns `masses` of every layer and segment, and `maps` of the chosen layers and segments.

        A mass is the softmax weight on the segment before, without a sink (`on_previous`), on all earlier segments
        (`on_earlier`), or on the first key that there is (`on_first`): the text's first token in a stock model, the
        memory's first row in a folded one, which is the sink if it has one. Masses are averaged over heads and queries.
        `by_head` [H] and `by_position` [T] split `on_previous`. `uniform` [T] is its value if all visible keys weighed
        the same. A map's `scores` [T, 2T] are from one head, or the mean of all (`head` None). They are scaled to
        0 ... 1 over the visible keys; hidden ones are None. A sink's are apart, in `sink` [T]. In segments of over 128
        tokens, scores are averaged in blocks of `block` x `block` tokens.
        """
        num_layers, length = item.config.num_hidden_layers, self.lengths[item.name]
        last = num_layers - 1
        layers = sorted({0, last // 2, last}) if self.options.layers is None else self.options.layers
        has_sink = getattr(item.config, "sink_token_id", None) is not None
        found = queries_and_keys(item.model, self.texts[item.name], length, range(num_layers), self.options.segments)
        masses, maps = [], []
        for layer in range(num_layers):
            for segment in self.options.segments:
                about = {"layer": layer, "segment": segment}
                score_HTK = scores(*found[layer, segment])
                masses.append({**about, **mass(score_HTK, has_sink)})
                if layer in layers:
                    pair_HTK = score_HTK[:, :, -2 * length :]
                    for head, score_Tk in [(None, pair_HTK.mean(0)), *((h, pair_HTK[h]) for h in self.options.heads)]:
                        maps.append({**about, "head": head, **scaled_map(score_Tk, has_sink)})
        return {"masses": masses, "maps": maps}

    def summarise(self, measured: Sequence[tuple[EvaluatedModel, Record]]) -> dict[str, Any]:
        return {
            field: [{"model": model.name, **one} for model, record in measured for one in record[field]]
            for field in ("masses", "maps")
        }

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [
            {field: value for field, value in one.items() if not isinstance(value, list)} for one in results["masses"]
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns tables by layer of the mass on the first key, on the segment before and, for stock models, on all
        earlier ones."""
        found = []
        for model in results["models"]:
            length, masses = results["segment_lengths"][model["name"]], select(results["masses"], model=model["name"])
            kinds = {
                "on_first": _first_key(model),
                "on_previous": "memory" if model["segment_length"] else "the segment before",
            }
            if "on_first" not in masses[0]:  # measured by an earlier version
                del kinds["on_first"]
            if not model["segment_length"]:
                kinds["on_earlier"] = "all earlier ones"
            rows: dict[Any, dict[str, Any]] = {one["layer"]: {"layer": one["layer"]} for one in masses}
            rows["even"] = {"layer": "even"}
            for one in masses:
                columns = {kind: f"segment {one['segment']}: % on {what}" for kind, what in kinds.items()}
                rows[one["layer"]] |= {column: f"{100 * one[kind]:.1f}" for kind, column in columns.items()}
                if one["layer"] == 0:
                    rows["even"][columns["on_previous"]] = f"{100 * np.mean(one['uniform']):.1f}"
            shown = shown_name(model["name"], results)
            title = f"{shown}: attention of segments of {length} tokens ('even': if all keys weighed the same)"
            found.append(table(title, list(rows.values())))
        return found

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws the maps and, in a second picture, the masses."""
        draw_maps(results, path)
        draw_mass(results, path.with_name(f"{path.name}_mass"))


def _first_key(model: dict[str, Any]) -> str:
    if not model["segment_length"]:
        return "the first token"
    return "the memory's first token" if model.get("sink_token_id") is None else "the sink"


def _before(model: dict[str, Any]) -> str:
    return "the memory" if model["segment_length"] else "the segment before"


def _read(model: EvaluatedModel, options: AttentionOptions) -> list[torch.Tensor]:
    """Returns the texts, or summary prompts for them up to the first that is long enough."""
    if not options.summarize:
        return read_texts(model.tokenizer, [options.text], text_field=options.text_field)
    source = find_source(options.text, None if options.text in NAMES else options.text_field)
    num_tokens = (max(options.segments) + 1) * (model.segment_length or options.segment_length)
    prompts = list[torch.Tensor]()
    for document in good_documents(read_documents([source], with_summaries=False), "refuse"):
        prompts.append(torch.tensor(prompt_ids(model.tokenizer, document.text)))
        if len(prompts[-1]) >= num_tokens:
            break
    if not prompts:
        raise ValueError(f"data {options.text} holds no document: pass files with text.")
    return prompts


def _long_enough(texts: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Returns the first `num_tokens` tokens of the first text that is long enough."""
    for ids_N in texts:
        if len(ids_N) >= num_tokens:
            return ids_N[:num_tokens]
    raise ValueError(
        f"the longest of {len(texts)} texts has {max(map(len, texts))} tokens, and the last segment ends at "
        f"{num_tokens}: pass a longer text, or earlier or shorter segments."
    )


def _check(model: EvaluatedModel, options: AttentionOptions) -> None:
    config, segments = model.config, options.segments
    if config.model_type not in (CondenseConfig.model_type, *FAMILIES):
        known = ", ".join(FAMILIES)
        raise ValueError(f"{model.name} is a {config.model_type!r}: maps can be made for folded models and {known}.")
    layers, heads = (options.layers or [], config.num_hidden_layers), (options.heads, config.num_attention_heads)
    for what, (chosen, count) in {"layer": layers, "head": heads}.items():
        if wrong := [number for number in chosen if not 0 <= number < count]:
            raise ValueError(f"{model.name} has no {what} {wrong[0]}: it has {count}, counted from 0.")
    if not segments or min(segments) < 1:
        raise ValueError(f"segments {list(segments)}: segment 0 is the first and has no memory; choose from 1 on.")
    window, layer_types = (getattr(config, name, None) for name in ("sliding_window", "layer_types"))
    num_tokens = (max(segments) + 1) * (model.segment_length or options.segment_length)
    if window is not None and "sliding_attention" in (layer_types or ["sliding_attention"]) and window < num_tokens:
        raise ValueError(
            f"{model.name} has sliding_window={window}, and segment {max(segments)} ends at {num_tokens:,} tokens: "
            "maps are of attention to all earlier text. Choose earlier or shorter segments."
        )


def draw_maps(results: Results, path: Path) -> None:
    """Draws maps: a row per model and segment, a column per layer and head. A line separates the two segments; a sink
    stands before them."""
    rows = [(model, segment) for model in results["models"] for segment in results["segments"]]
    columns = list(dict.fromkeys((one["layer"], one["head"]) for one in results["maps"]))
    by_panel = key_by(results["maps"], "model", "segment", "layer", "head")
    size = (0.6 + 4.1 * len(columns), 0.4 + 2.4 * len(rows))
    with picture(path, rows=len(rows), columns=len(columns), figsize=size, squeeze=False) as panels:
        for (model, segment), row in zip(rows, panels, strict=True):
            for (layer, head), axes in zip(columns, row, strict=True):
                one = by_panel.get((model["name"], segment, layer, head))
                if one is None:  # a model with fewer layers
                    axes.axis("off")
                    continue
                image = _draw_map(axes, one, results["segment_lengths"][model["name"]])
                which = "mean of heads" if head is None else f"head {head}"
                axes.set_title(f"{shown_name(model['name'], results)}: layer {layer}, {which}", fontsize=9)
                before = "memory" if model["segment_length"] else "before"
                axes.set_xlabel(f"segment {segment - 1} ({before})  |  segment {segment} (current)", fontsize=8)
            row[0].set_ylabel(f"queries of segment {segment}", fontsize=8)
        bar = panels[0, 0].figure.colorbar(image, ax=panels, shrink=0.6, aspect=30, pad=0.01)
        bar.set_label("score before softmax, scaled by map", fontsize=8)


def _draw_map(axes: Any, one: dict[str, Any], length: int) -> Any:
    cells = np.array(one["scores"], dtype=float)  # None becomes NaN, which stays white
    look = {"vmin": 0, "vmax": 1, "cmap": "viridis", "interpolation": "nearest"}
    image = axes.imshow(cells, extent=(0, 2 * length, length, 0), **look)
    axes.axvline(length, color="white", linewidth=2.5)
    axes.axvline(length, color="crimson", linewidth=1)
    if "sink" in one:
        width, end = length / 12, -length / 24
        axes.imshow(np.array(one["sink"])[:, None], extent=(end - width, end, length, 0), **look)
        axes.set(xlim=(end - width, 2 * length), ylim=(length, 0))
        ticks = [tick for tick in axes.get_xticks() if 0 < tick <= 2 * length]
        axes.set_xticks([end - width / 2, *ticks], ["sink", *(f"{tick:g}" for tick in ticks)])
    axes.tick_params(labelsize=7)
    return image


def draw_mass(results: Results, path: Path) -> None:
    """Draws the mass on the segment before, by layer and query position, and on the first key by layer; a row of panels
    per model."""
    models = results["models"]
    has_first = "on_first" in results["masses"][0]  # unless an earlier version has measured them
    columns = 2 + has_first
    size = (5.5 * columns, 3.8 * len(models))
    with picture(path, rows=len(models), columns=columns, figsize=size, squeeze=False) as panels:
        for (left, right, *more), model in zip(panels, models, strict=True):
            masses, maps = (select(results[which], model=model["name"]) for which in ("masses", "maps"))
            shown = shown_name(model["name"], results)
            by_layer = (left, "on_previous", _before(model)), *((axes, "on_first", _first_key(model)) for axes in more)
            for axes, kind, what in by_layer:
                _draw_by_layer(axes, masses, results["segments"], kind)
                finish(axes, f"{shown}: by layer", "layer", f"% of attention on {what}", legend=8)
            _draw_by_position(right, masses, sorted({one["layer"] for one in maps}))
            title, x = f"{shown}: by position, mean of the segments", "position of the query in its segment [tokens]"
            finish(right, title, x, f"% of attention on {_before(model)}", legend=8)
            for axes in (left, right, *more):
                axes.set_ylim(0, 100)


def _draw_by_layer(axes: Any, masses: Sequence[dict[str, Any]], segments: Sequence[int], kind: str) -> None:
    for number, segment in enumerate(segments):
        chosen, color = select(masses, segment=segment), f"C{number}"
        layers, shares = [one["layer"] for one in chosen], [100 * one[kind] for one in chosen]
        axes.plot(layers, shares, marker="o", markersize=4, color=color, label=f"segment {segment}")
        if kind == "on_previous" and chosen[0]["on_earlier"]:
            earlier = [100 * one["on_earlier"] for one in chosen]
            axes.plot(layers, earlier, linestyle=":", color=color, label=f"segment {segment}: on all earlier ones")
    evenly = {100 * np.mean(one["uniform"]) for one in masses}
    if kind == "on_previous" and len(evenly) == 1:  # a stock model's values differ by segment
        axes.axhline(evenly.pop(), **EVEN)
    axes.set_xticks(layers if len(layers) <= 16 else layers[:: len(layers) // 8])


def _draw_by_position(axes: Any, masses: Sequence[dict[str, Any]], layers: Sequence[int]) -> None:
    for layer in layers:
        chosen = [one["by_position"] for one in select(masses, layer=layer)]
        axes.plot(*by_position(100 * np.mean(chosen, axis=0)), linewidth=1.2, label=f"layer {layer}")
    even = by_position(100 * np.mean([one["uniform"] for one in masses], axis=0))
    axes.plot(*even, **EVEN)
