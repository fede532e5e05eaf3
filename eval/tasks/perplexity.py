"""How much the memory helps and how far back: the same segments, predicted with more and more text before.

A window of S segments begins at every segment of a text. So each segment from the S-th on is predicted with 0, 1, ...
S - 1 segments before it. The tokens are always the same, and differences are taken segment by segment. All curves
begin at `cut_off`, which reads a segment without any memory.

A folded model gives three more curves: `folded` (a layer's output is remembered), `layer_input` (Transformer-XL's
memory) and `full_attention` (the stock Llama). All use the same weights and code. Only the curve that the weights were
trained for is a real model. The others are ablations and don't show what training for them would give. Any other model
gives `full_attention`, which for stateful models means their own state.

Axes: W windows, S segments of a window, L tokens of a segment, n segments that are predicted with every number before.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from condense import CondenseConfig, CondenseForCausalLM, to_stock
from condense.checks import quantization_of

from ..charts import finish
from ..decoding import max_positions, reads_in_parts
from ..models import EvaluatedModel
from ..overview import Figure, remark_of
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results
from ..statistics import bootstrap
from ..tables import select
from .evaluation import Evaluation, data_of
from .options import CURVES, PerplexityOptions
from .variants import variant
from .windows import Window, by_position, find_pairs, plan_windows, read_texts, window_losses

LABELS = {
    "cut_off": "memory cut off",
    "folded": "folded: the layer's output",
    "layer_input": "Transformer-XL: the layer's input",
    "full_attention": "full attention",
}
LOSS = "loss [nats per token]"
STATEFUL = "the model's own state"  # of a model that has more than attention, or none
COLORS = {"cut_off": "0.35", "folded": "tab:blue", "layer_input": "tab:orange", "full_attention": "tab:green"}
OWN_CURVES = {"layer_output": "folded", "layer_input": "layer_input"}  # by memory_source


class Batch(NamedTuple):
    """A batch of windows for one curve; `first` is the number of its first window."""

    name: str
    curve: str
    first: int
    windows: list[Window]


class Perplexity(Evaluation[Batch]):
    """Measures per model and variant the loss by the number of segments before, and by position in the segment.

    `texts` are token ids [N] by the name of the model. Raises `ValueError` if no text fills a window, or for curves
    that a model does not have.
    """

    kind = "perplexity"
    unit = "batch"
    Options = PerplexityOptions

    def __init__(self, options: PerplexityOptions, models: Sequence[EvaluatedModel], texts: dict[str, Any]):
        super().__init__(options, models)
        self.texts = texts
        self.lengths = {model.name: model.segment_length or options.segment_length for model in models}
        self.windows = {
            name: plan_windows(texts[name], options.num_segments, length) for name, length in self.lengths.items()
        }
        self.curves = check_curves(models, options)
        self._variants = dict[str, dict[str, Any]]()  # of the only model in memory

    @classmethod
    def load(cls, options: PerplexityOptions) -> "Perplexity":
        models = cls.load_models(options)
        check_curves(models, options)  # before any text is read
        source = (options.data, options.max_tokens, options.text_field)
        return cls(options, models, {model.name: read_texts(model.tokenizer, *source) for model in models})

    def settings(self) -> dict[str, Any]:
        texts = {name: _describe(texts) for name, texts in self.texts.items()}
        return super().settings() | {"texts": texts, "segment_lengths": self.lengths}

    def items(self) -> list[Batch]:
        size = self.options.batch_size
        return [
            Batch(name, curve, first, windows[first : first + size])
            for name, windows in self.windows.items()
            for curve in self.curves[name]
            for first in range(0, len(windows), size)
        ]

    def num_tokens(self, item: Batch) -> int:
        return max(window.size for window in item.windows) * self.lengths[item.name]

    def model_of(self, item: Batch) -> EvaluatedModel:
        return next(model for model in self.models if model.name == item.name)

    def shown_as(self, item: Batch) -> str:
        return f"{item.name}, {LABELS[item.curve]}"

    def positions_exceeded(self, item: Batch) -> int | None:
        known = max_positions(self.model_of(item).config)
        if item.curve != "full_attention":
            return super().positions_exceeded(item)
        return known if known is not None and self.num_tokens(item) > known else None

    def key(self, item: Batch) -> Key:
        return {"model": item.name, "curve": item.curve, "first_window": item.first}

    def measure(self, item: Batch) -> Record:
        """Returns the segments' `losses` [W][S], and `sums` [S][L] over the segments that every column counts.

        `stateful` is set if the model reads a text in one call, like Mamba.
        """
        num_segments, length = self.options.num_segments, self.lengths[item.name]
        if item.name not in self._variants:
            self._variants = {}  # before the next model is loaded
            self._variants = {item.name: curve_models(self.model_of(item), self.curves[item.name])}
        model = self._variants[item.name][item.curve]
        loss_WSL = window_losses(model, self.texts[item.name], item.windows, num_segments, length)
        if not np.isfinite(loss_WSL).all():
            raise ValueError(f"{item.name}: losses are not finite; use another dtype or checkpoint.")
        counted_WS1 = find_pairs(item.windows, num_segments)[:, :, None]
        stateful = {} if reads_in_parts(model) else {"stateful": True}
        return {"losses": loss_WSL.mean(-1).tolist(), "sums": loss_WSL.sum(0, where=counted_WS1).tolist(), **stateful}

    def summarise(self, measured: Sequence[tuple[Batch, Record]]) -> dict[str, Any]:
        """Returns `curves`, each with `points` and its mean `loss` [S][L] by segments before and position in a segment.

        For each number of `segments_before`, a point holds the mean cross-entropy in nats per token. It also holds the
        gain over no segments before (`gained`), and 95 % intervals of both (bootstrap over segments).
        """
        curves = list[dict[str, Any]]()
        for name, of_model in self.curves.items():
            for curve in of_model:
                records = [record for item, record in measured if (item.name, item.curve) == (name, curve)]
                curves += self._curve(name, curve, records, with_cut_off=curve == of_model[0])
        return {"curves": curves}

    def _curve(self, name: str, curve: str, records: Sequence[Record], with_cut_off: bool) -> Iterator[dict[str, Any]]:
        num_segments = self.options.num_segments
        losses_WS = np.array([losses_S for record in records for losses_S in record["losses"]])
        sums_SL = np.zeros((num_segments, self.lengths[name]))
        for record in records:
            sums_SL += record["sums"]
        losses_nS = losses_WS.T[find_pairs(self.windows[name], num_segments).T].reshape(num_segments, -1).T
        points, loss_SL = _points(losses_nS), (sums_SL / len(losses_nS)).tolist()
        about = {"model": name, "curve": curve, "segment_length": self.lengths[name]}
        about |= {"stateful": True} if records[0].get("stateful") else {}
        if with_cut_off:
            yield {**about, "curve": "cut_off", "points": points[:1], "loss": loss_SL[:1]}
        yield {**about, "points": points, "loss": loss_SL}

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        """Returns each model's loss with the most text before, without ablations of its memory."""
        own = {model["name"]: OWN_CURVES.get(model["memory_source"], "full_attention") for model in results["models"]}
        found = []
        for curve in results["curves"]:
            if curve["curve"] == own[curve["model"]]:
                point, length = curve["points"][-1], curve["segment_length"]
                before = f"{point['segments_before']} segments of {length} tokens"
                figures = (point[field] for field in ("loss", "low", "high"))
                remark = remark_of(f"{curve['model']}, {LABELS[curve['curve']]}", results)
                measure = f"loss on {data_of(results)} with {before} before [nats per own token]"
                found.append(Figure(curve["model"], measure, *figures, digits=4, remark=remark))
        return found

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [
            {"model": curve["model"], "curve": curve["curve"], **point}
            for curve in results["curves"]
            for point in curve["points"]
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns a table by model, curve and number of segments before: 1, 2, 4, 8 ... and the largest."""
        columns = ["model", "curve", "segment [tokens]", "segments before", "loss [nats/token]", "95 % interval"]
        columns += ["perplexity", "gained by memory [nats/token]", "95 % interval of the gain"]
        last, rows = results["num_segments"] - 1, []
        for curve in results["curves"]:
            for point in curve["points"]:
                before, is_cut_off = point["segments_before"], curve["curve"] == "cut_off"
                if not is_cut_off and (before == 0 or (before & (before - 1) and before != last)):
                    continue
                row = [curve["model"], _label_of(curve, results, before), curve["segment_length"], before]
                row += [f"{point['loss']:.4f}", f"{point['low']:.4f} to {point['high']:.4f}"]
                row += [f"{np.exp(point['loss']):,.2f}"]
                gained = [f"{point['gained']:+.4f}", f"{point['gained_low']:+.4f} to {point['gained_high']:+.4f}"]
                rows.append(row + (["", ""] if is_cut_off else gained))
        segments = {curve["model"]: curve["points"][0]["segments"] for curve in results["curves"]}
        counted = ", ".join(f"{name}: {count:,}" for name, count in segments.items())
        return [Table(f"loss by text before it, on the same segments throughout ({counted} of them)", columns, rows)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws the loss by segments before and by position in the segment; a row of panels per model."""
        names = [model["name"] for model in results["models"]]
        with picture(path, rows=len(names), columns=2, figsize=(11, 4.2 * len(names)), squeeze=False) as panels:
            for (left, right), name in zip(panels, names, strict=True):
                for curve in select(results["curves"], model=name):
                    _draw_curve(left, right, curve, _label_of(curve, results))
                _label(left, right, name, results["segment_lengths"][name], results["num_segments"])


def _describe(texts: Sequence[torch.Tensor]) -> dict[str, Any]:
    ids = torch.cat(list(texts)).numpy()
    return {"documents": len(texts), "tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}


def check_curves(models: Sequence[EvaluatedModel], options: PerplexityOptions) -> dict[str, list[str]]:
    """Returns each model's curves. Raises `ValueError` for unavailable ones, also because of a device map or because
    the weights are quantized."""
    curves = {model.name: curve_names(model, options.curves) for model in models}
    for model in models:
        own = OWN_CURVES.get(getattr(model.config, "memory_source", ""), "full_attention")
        if options.device_map is not None and curves[model.name] != [own]:
            raise ValueError(
                f"--device-map {options.device_map} places the layers of the checkpoint, not of ablations: pass "
                f"--curves {own} for {model.name}."
            )
        if (method := quantization_of(model.config)) is not None and curves[model.name] != [own]:
            raise ValueError(
                f"the weights of {model.name} are quantized ({method}), and its ablations can't share them: pass "
                f"--curves {own} for it."
            )
    return curves


def curve_names(evaluated: EvaluatedModel, curves: Sequence[str]) -> list[str]:
    """Returns the given curves that a model has, in the order of `CURVES`. Raises `ValueError` if it has none."""
    possible = CURVES if evaluated.config.model_type == CondenseConfig.model_type else ("full_attention",)
    chosen = [curve for curve in possible if curve in curves]
    if not chosen:
        raise ValueError(f"{evaluated.name} has none of the curves {list(curves)}, only {', '.join(possible)}.")
    return chosen


def curve_models(evaluated: EvaluatedModel, curves: Sequence[str]) -> dict[str, Any]:
    """Returns the model for each curve of the evaluated one; all share its weights."""
    model = evaluated.model
    folded = isinstance(model, CondenseForCausalLM)
    return {curve: _variant(model, curve) if folded else model for curve in curve_names(evaluated, curves)}


def _variant(model: CondenseForCausalLM, curve: str) -> Any:
    if curve == "full_attention":
        return to_stock(model)
    (source,) = (source for source, own in OWN_CURVES.items() if own == curve)
    if model.config.memory_source == source:
        return model
    attention = model.config._attn_implementation
    return variant(model, attention, memory_source=source, memory_share=1.0)


def _points(losses_nS: np.ndarray) -> list[dict[str, Any]]:
    points = []
    for before, losses_n in enumerate(losses_nS.T):
        gained_n = losses_nS[:, 0] - losses_n
        point: dict[str, Any] = {"segments_before": before, "segments": len(losses_n)}
        for mean, prefix, values_n in (("loss", "", losses_n), ("gained", "gained_", gained_n)):
            low, high = bootstrap(values_n)
            point |= {mean: float(values_n.mean()), f"{prefix}low": low, f"{prefix}high": high}
        points.append(point)
    return points


def _label_of(curve: dict[str, Any], results: Results, before: int | None = None) -> str:
    """Returns a curve's label, with the positions that the model's texts exceed; `before` is for one point."""
    label = LABELS[curve["curve"]]
    positions = results.get("positions_exceeded", {}).get(f"{curve['model']}, {label}")
    model = next(model for model in results["models"] if model["name"] == curve["model"])
    if "memory_share" in model and curve["curve"] == "folded":
        label = f"folded: memory_share={model['memory_share']}"
    if "sink_token_id" in model and curve["curve"] in OWN_CURVES.values():
        label += f", sink_token_id={model['sink_token_id']}"
    if curve.get("stateful") and curve["curve"] == "full_attention":
        label = STATEFUL
    if positions is None or (before is not None and (before + 1) * curve["segment_length"] <= positions):
        return label
    return f"{label} (past its {positions:,} positions)"


def _draw_curve(left: Any, right: Any, curve: dict[str, Any], label: str) -> None:
    name, points = curve["curve"], curve["points"]
    style: dict[str, Any] = {"color": COLORS[name], "label": label}
    dashed = {"linestyle": "--"} if name == "cut_off" else {}
    right.plot(*by_position(np.array(curve["loss"][-1])), linewidth=1.2, **dashed, **style)
    if name == "cut_off":
        left.axhline(points[0]["loss"], linewidth=1.2, **dashed, **style)
        return
    before = [point["segments_before"] for point in points]
    left.plot(before, [point["loss"] for point in points], marker="o", markersize=4, **style)
    # The band shows the paired difference, without the variation among segments.
    low, high = ([points[0]["loss"] - point[bound] for point in points] for bound in ("gained_low", "gained_high"))
    left.fill_between(before, low, high, color=COLORS[name], alpha=0.15, linewidth=0)


def _label(left: Any, right: Any, name: str, length: int, num_segments: int) -> None:
    before = f"segments of {length} tokens before\n(shaded: 95 % interval of the difference to none)"
    finish(left, f"{name}: loss by text before", before, LOSS)
    left.set_xticks(range(num_segments) if num_segments <= 16 else range(0, num_segments, num_segments // 8))
    title = f"loss by position, with {num_segments - 1} segments before"
    finish(right, title, "position in the segment [tokens]", LOSS, legend=8)
