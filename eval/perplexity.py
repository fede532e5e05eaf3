"""What the memory buys, and how far back: the same segments of text, predicted with more and more text before.

A window of S segments begins at every segment of a text. So each segment from the S-th on is predicted with
0, 1, ... S - 1 segments before it, each time the same tokens, and differences are taken segment by segment.
With none before it a segment is read without any memory: that is the curve `cut_off`, where all others begin.

A folded model gives three more curves: `folded` (a layer's output is remembered), `layer_input`
(Transformer-XL's memory) and `full_attention` (the stock Llama). All are of the same weights, read by the same
code. Only the one that the weights were trained for is a model in its own right; the others are ablations, and
no measure of what a model trained in their way would reach. A stock model gives `full_attention`.

Axes: W windows, S segments of a window, l tokens of a segment, J segments predicted with every number before.
"""

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from condense import CondenseForCausalLM, to_llama

from .models import Subject, load_subjects
from .records import Records, open_records
from .results import Table, circumstances, picture, write_results
from .statistics import bootstrap
from .windows import paired, plan_windows, read_texts, window_losses

LABELS = {
    "cut_off": "memory cut off",
    "folded": "folded: the layer's output",
    "layer_input": "Transformer-XL: the layer's input",
    "full_attention": "full attention",
}
COLORS = {"cut_off": "0.35", "folded": "tab:blue", "layer_input": "tab:orange", "full_attention": "tab:green"}
CURVES = tuple(LABELS)[1:]
BINS = 32  # of the position in the segment, where it is drawn


def perplexity(
    models: Sequence[str],
    output: Path,
    data: Sequence[str],
    num_segments: int = 8,
    segment_length: int = 512,
    max_tokens: int | None = 2**16,
    curves: Sequence[str] = CURVES,
    batch_size: int = 8,
    text_field: str = "text",
    dtype: str = "auto",
    attention: str = "auto",
) -> dict[str, Any]:
    """Measures models (folders or hub ids, `NAME=FOLDER` for a name), and writes output/perplexity.*.

    `data` are files or glob patterns (.txt, .jsonl, .parquet), read up to `max_tokens`. `segment_length` is for
    stock models; a folded one has its own. Stopped and called again with the same arguments, it goes on.
    """
    subjects = load_subjects(list(models), dtype, attention)
    lengths = {subject.name: subject.segment_length or segment_length for subject in subjects}
    texts = {subject.name: read_texts(subject.tokenizer, data, max_tokens, text_field) for subject in subjects}
    settings = {
        "models": [subject.describe() for subject in subjects],
        "data": list(data),
        "texts": {name: _describe(texts[name]) for name in texts},
        "num_segments": num_segments,
        "segment_lengths": lengths,
        "batch_size": batch_size,
        "attention": attention,
    }
    with open_records(output / "perplexity.records.jsonl", settings) as records:
        found = []
        for subject in subjects:
            name = subject.name
            found += measure_perplexity(subject, texts[name], num_segments, lengths[name], curves, batch_size, records)
        results = {"kind": "perplexity", **circumstances(), **settings, "curves": found}
        points = [{"model": c["model"], "curve": c["curve"], **point} for c in found for point in c["points"]]
        write_results(output / "perplexity", results, points)
        draw(results, output / "perplexity")
    return results


def _describe(texts: Sequence[torch.Tensor]) -> dict[str, Any]:
    ids = torch.cat(list(texts)).numpy()
    return {"documents": len(texts), "tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}


def measure_perplexity(
    subject: Subject,
    texts: Sequence[torch.Tensor],
    num_segments: int = 8,
    segment_length: int = 512,
    curves: Sequence[str] = CURVES,
    batch_size: int = 8,
    records: Records | None = None,
) -> list[dict[str, Any]]:
    """One record per curve: `points`, and the mean `loss` [S][l] by segments before and position in the segment.

    A point holds, for one number of `segments_before`, the mean cross-entropy in nats per token, what the
    segments before have `gained` against none, and 95 % intervals of both (bootstrap over segments). `texts` are
    token ids [N]; `segment_length` is for stock models. Raises `ValueError` where no text fills a window, and for
    curves that a model does not have.
    """
    segment_length = subject.segment_length or segment_length
    if num_segments < 2 or min(segment_length, batch_size) < 1:
        raise ValueError(
            f"num_segments={num_segments}, segment_length={segment_length}, batch_size={batch_size}: pass at least two "
            "segments, of at least one token, and at least one window at once."
        )
    windows = plan_windows(texts, num_segments, segment_length)
    models = curve_models(subject, curves)
    records = records or Records(None, {})
    found = list[dict[str, Any]]()
    for curve, model in models.items():
        about = {"model": subject.name, "curve": curve, "segment_length": segment_length}
        losses_WS, sums_Sl = list[list[float]](), np.zeros((num_segments, segment_length))
        with tqdm(total=len(windows), unit="window", desc=f"perplexity {subject.name} {curve}") as bar:
            for first in range(0, len(windows), batch_size):
                batch = windows[first : first + batch_size]

                def measure(model=model, batch=batch) -> dict[str, Any]:
                    loss_WSl = window_losses(model, texts, batch, num_segments, segment_length)
                    if not np.isfinite(loss_WSl).all():
                        raise ValueError(f"{subject.name}: losses are not finite; take another dtype or checkpoint.")
                    counted_WS1 = paired(batch, num_segments)[:, :, None]
                    return {"losses": loss_WSl.mean(-1).tolist(), "sums": loss_WSl.sum(0, where=counted_WS1).tolist()}

                record = records.get({"model": subject.name, "curve": curve, "first_window": first}, measure)
                losses_WS += record["losses"]
                sums_Sl += np.array(record["sums"])
                bar.update(len(batch))
        losses_JS = np.array(losses_WS).T[paired(windows, num_segments).T].reshape(num_segments, -1).T
        points, loss_Sl = _points(losses_JS), (sums_Sl / len(losses_JS)).tolist()
        if not found:
            found.append({**about, "curve": "cut_off", "points": points[:1], "loss": loss_Sl[:1]})
        found.append({**about, "points": points, "loss": loss_Sl})
    return found


def curve_models(subject: Subject, curves: Sequence[str]) -> dict[str, Any]:
    """The model behind each curve, in the order of `CURVES`; all share the subject's weights."""
    if unknown := [curve for curve in curves if curve not in CURVES]:
        raise ValueError(f"curves {unknown} are not known: choose from {', '.join(CURVES)}.")
    folded = isinstance(subject.model, CondenseForCausalLM)
    there = CURVES if folded else ("full_attention",)
    chosen = [curve for curve in there if curve in curves]
    if not chosen:
        raise ValueError(f"{subject.name} has none of the curves {list(curves)}, but {', '.join(there)}.")
    return {curve: _variant(subject.model, curve) if folded else subject.model for curve in chosen}


def _variant(model: CondenseForCausalLM, curve: str) -> Any:
    if curve == "full_attention":
        return to_llama(model)
    source = {"folded": "layer_output", "layer_input": "layer_input"}[curve]
    if model.config.memory_source == source:
        return model
    config = deepcopy(model.config)
    config.memory_source = source
    other = CondenseForCausalLM(config)
    other.load_state_dict(model.state_dict(), assign=True)
    if model.lm_head.weight is model.model.embed_tokens.weight:
        other.tie_weights()
    return other.to(model.device).eval()


def _points(losses_JS: np.ndarray) -> list[dict[str, Any]]:
    points = []
    for before, losses_J in enumerate(losses_JS.T):
        gained_J = losses_JS[:, 0] - losses_J
        low, high = bootstrap(losses_J)
        gained_low, gained_high = bootstrap(gained_J)
        points.append(
            {
                "segments_before": before,
                "segments": len(losses_J),
                "loss": float(losses_J.mean()),
                "low": low,
                "high": high,
                "gained": float(gained_J.mean()),
                "gained_low": gained_low,
                "gained_high": gained_high,
            }
        )
    return points


def tables(results: dict[str, Any]) -> list[Table]:
    """A line per model, curve and number of segments before: 1, 2, 4, 8 ... and the most."""
    columns = ["model", "curve", "segment [tokens]", "segments before", "loss [nats/token]", "95 % interval"]
    columns += ["perplexity", "gained by memory [nats/token]", "95 % interval of the gain"]
    last, rows = results["num_segments"] - 1, []
    for curve in results["curves"]:
        for point in curve["points"]:
            before, is_cut_off = point["segments_before"], curve["curve"] == "cut_off"
            if not is_cut_off and (before == 0 or (before & (before - 1) and before != last)):
                continue
            row = [curve["model"], LABELS[curve["curve"]], curve["segment_length"], before, f"{point['loss']:.4f}"]
            row += [f"{point['low']:.4f} to {point['high']:.4f}", f"{np.exp(point['loss']):,.2f}"]
            if not is_cut_off:
                row += [f"{point['gained']:+.4f}", f"{point['gained_low']:+.4f} to {point['gained_high']:+.4f}"]
            rows.append(row + [""] * (len(columns) - len(row)))
    segments = {curve["model"]: curve["points"][0]["segments"] for curve in results["curves"]}
    counted = ", ".join(f"{name}: {count:,}" for name, count in segments.items())
    return [Table(f"loss by text before it, on the same segments throughout ({counted} of them)", columns, rows)]


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss by number of segments before, and by position in the segment; a row of panels per model."""
    names = [model["name"] for model in results["models"]]
    with picture(path, rows=len(names), columns=2, figsize=(11, 4.2 * len(names)), squeeze=False) as panels:
        for (left, right), name in zip(panels, names, strict=True):
            for curve in results["curves"]:
                if curve["model"] == name:
                    _draw_curve(left, right, curve)
            _label(left, right, name, results["segment_lengths"][name], results["num_segments"])


def _draw_curve(left: Any, right: Any, curve: dict[str, Any]) -> None:
    name, points, length = curve["curve"], curve["points"], curve["segment_length"]
    style: dict[str, Any] = {"color": COLORS[name], "label": LABELS[name]}
    size = -(-length // BINS)
    starts = np.arange(0, length, size)
    by_position = [np.mean(curve["loss"][-1][start : start + size]) for start in starts]
    middle = starts + (np.minimum(starts + size, length) - starts - 1) / 2
    if name == "cut_off":
        left.axhline(points[0]["loss"], linestyle="--", linewidth=1.2, **style)
        right.plot(middle, by_position, linestyle="--", linewidth=1.2, **style)
        return
    before = [point["segments_before"] for point in points]
    left.plot(before, [point["loss"] for point in points], marker="o", markersize=4, **style)
    # Of the paired difference: what segments differ in among themselves is no part of it.
    low, high = ([points[0]["loss"] - point[bound] for point in points] for bound in ("gained_low", "gained_high"))
    left.fill_between(before, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
    right.plot(middle, by_position, linewidth=1.2, **style)


def _label(left: Any, right: Any, name: str, length: int, num_segments: int) -> None:
    left.set_title(f"{name}: what the text before buys", fontsize=10)
    left.set_xlabel(f"segments of {length} tokens before\n(shaded: 95 % interval of the difference to none)")
    left.set_xticks(range(num_segments) if num_segments <= 16 else range(0, num_segments, num_segments // 8))
    right.set_title(f"where in the segment, with {num_segments - 1} segments before", fontsize=10)
    right.set_xlabel("position in the segment [tokens]")
    for axes in (left, right):
        axes.set_ylabel("loss [nats per token]")
        axes.grid(alpha=0.3)
    right.legend(fontsize=8)
