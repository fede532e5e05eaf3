"""Whether the fold of a stock checkpoint diverges before any training, which layers make it, and what stops it.

One text is read with several memory shares in all layers, with share 1 in one layer alone, and with share 1 under each
remedy of `fold_layers`. Excesses are losses above those of share 0 on the same tokens.

Axes: N tokens of the text, S segments.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..charts import finish
from ..models import EvaluatedModel
from ..results import Table, picture
from ..results_store import Key, Record
from ..runner import Results
from ..tables import key_by, select
from .evaluation import Evaluation, data_of, shown_name
from .fold_arms import check_arm, share_of
from .fold_cost import find_sinks
from .fold_layers import REMEDIES, Traces, remembering
from .fold_texts import long_texts
from .options import FoldStabilityOptions
from .variants import StockInMemory, variant
from .windows import head_losses

CONTROL = "share 0"
REMEMBERED = {
    "rescaled": "share 1, M = Y in the length of X",
    "limited": "share 1, Y - X at most a tenth of X",
    "centred": "share 1, Y less the segment's mean of Y - X",
    "clipped": "share 1, each dimension clipped to X's range",
}
TRACES = {"on_memory": "attention on the memory", "alike": "mean cosine of neighbouring remembered states"}
PAPER_FOLD = {"kind": "share", "value": "1"}  # share 1 in all layers
DIGITS = 4  # of a trace
DIVERGED = 1.0  # nats a token above share 0 in the last quarter


class Arm(NamedTuple):
    """A memory: a share of all layers, or share 1 in one layer alone, or share 1 under a remedy."""

    model: str
    kind: str
    value: str


class FoldStability(Evaluation[Arm]):
    """A record has the `losses` [S] of the segments, the traces of `fold_layers` for a share and a remedy, and the
    `sink_norms` of the layers. `texts` are token ids [S L + 1] by the name of the model."""

    kind = "fold_stability"
    unit = "memory"
    Options = FoldStabilityOptions

    def __init__(self, options: FoldStabilityOptions, models: Sequence[EvaluatedModel], texts: dict[str, Any]):
        super().__init__(options, models)
        self.texts, self.sinks = texts, check_models(models, options)
        self.stock = StockInMemory()

    @classmethod
    def load(cls, options: FoldStabilityOptions) -> "FoldStability":
        models = cls.load_models(options)
        check_models(models, options)  # before any text is read
        length = options.num_segments * options.segment_length + 1
        source = (options.data, options.text_field, 1, length)
        return cls(options, models, {one.name: long_texts(one.tokenizer, *source)[0][:length] for one in models})

    def settings(self) -> dict[str, Any]:
        digests = {name: hashlib.sha256(ids_N.numpy().tobytes()).hexdigest() for name, ids_N in self.texts.items()}
        return super().settings() | {"sha256": digests, "sinks": self.sinks}

    def items(self) -> list[Arm]:
        found = []
        for model in self.models:
            shares = dict.fromkeys(["0", *self.options.shares, "1"])
            found += [Arm(model.name, "share", share) for share in shares]
            found += [Arm(model.name, "remedy", remedy) for remedy in REMEDIES]
            found += [Arm(model.name, "layer", str(layer)) for layer in range(model.config.num_hidden_layers)]
        return found

    def model_of(self, item: Arm) -> EvaluatedModel:
        return next(model for model in self.models if model.name == item.model)

    def key(self, item: Arm) -> Key:
        return item._asdict()

    def in_words(self, item: Arm) -> str:
        return f"{item.model}, {label_of(item.kind, item.value)}"

    def measure(self, item: Arm) -> Record:
        model, share = self._variant(item), item.kind != "layer"
        ids_N, length, traces = self.texts[item.model].to(model.device), self.options.segment_length, Traces()
        with ExitStack() as stack:
            if item.kind == "remedy":
                stack.enter_context(remembering(model, item.value))
            if share:
                stack.enter_context(traces.note_readings(model))
            with torch.no_grad():
                hidden_ND = model.model(ids_N[None, :-1], use_cache=False).last_hidden_state[0]
        losses_S = head_losses(model, hidden_ND, ids_N[1:]).view(-1, length).mean(1)
        if not torch.isfinite(losses_S).all():
            raise ValueError(f"{item.model}: losses are not finite; use another dtype or checkpoint.")
        return {"losses": losses_S.tolist(), "traces": traces.records, "sink_norms": traces.sink_norms}

    def _variant(self, item: Arm) -> Any:
        evaluated = self.model_of(item)
        fields = {
            "segment_length": self.options.segment_length, "memory_source": "layer_output", "bptt_segments": None,
            "memory_share": _share(item, evaluated.config.num_hidden_layers), "sink_token_id": self.sinks[item.model],
            "schedule": "sequential",  # a segment at a time, so that traces are of whole segments
        }  # fmt: skip
        return variant(self.stock(evaluated), self.options.attention, **fields)

    def summarise(self, measured: Sequence[tuple[Arm, Record]]) -> dict[str, Any]:
        """Returns `arms` with their losses and excesses over share 0, `traces`, and the `sink_norms` of each model."""
        arms, traces, norms = [], [], {}
        for item, record in measured:
            losses_S = np.array(record["losses"])
            control_S = np.array(next(r["losses"] for i, r in measured if i == Arm(item.model, "share", "0")))
            excess_S, last = losses_S - control_S, len(losses_S) - len(losses_S) // 4
            late = float(excess_S[last:].mean())
            about = item._asdict()
            arms.append({**about, "excess": float(excess_S[1:].mean()), "late": late, "diverges": late > DIVERGED,
                         "losses": record["losses"]})  # fmt: skip
            traces += [
                {**about, **{name: round(value, DIGITS) for name, value in one.items()}} for one in record["traces"]
            ]
            if record["sink_norms"]:
                norms[item.model] = record["sink_norms"]
        return {"arms": arms, "traces": traces, "sink_norms": norms}

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """Returns the losses by segment, then the traces."""
        found = []
        for arm in results["arms"]:
            about = {name: arm[name] for name in ("model", "kind", "value")}
            found += [{**about, "segment": number, "loss": loss} for number, loss in enumerate(arm["losses"])]
        return found + results["traces"]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        found = []
        for model in results["models"]:
            arms = select(results["arms"], model=model["name"])
            late = f"last {len(arms[0]['losses']) // 4} segments"
            columns = ["memory", "from segment 2 on", late, "diverges"]
            rows = [
                [label_of(arm["kind"], arm["value"]), f"{arm['excess']:+.3f}", f"{arm['late']:+.3f}",
                 "yes" if arm["diverges"] else "no"]
                for arm in arms
            ]  # fmt: skip
            title = f"{shown_name(model['name'], results)}: loss above share 0, with a sink [nats a token]"
            about = f"segments of {results['segment_length']} tokens, {data_of(results)}"
            found += [Table(f"{title} ({about})", columns, rows), _layers(model["name"], results)]
        return found

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        models = [model["name"] for model in results["models"]]
        with picture(path, rows=2 * len(models), columns=2, figsize=(13, 8.6 * len(models)), squeeze=False) as panels:
            for number, name in enumerate(models):
                (losses, layers), maps = panels[2 * number], panels[2 * number + 1]
                arms = select(results["arms"], model=name)
                _draw_excess(losses, shown_name(name, results), arms)
                _draw_layers(layers, select(arms, kind="layer"))
                for axes, (field, title) in zip(maps, TRACES.items(), strict=True):
                    _draw_trace(axes, select(results["traces"], model=name, **PAPER_FOLD), field, title)


def label_of(kind: str, value: str) -> str:
    """Returns the name of a memory."""
    if kind == "layer":
        return f"share 1 in layer {value} alone"
    return f"share {_in_words(value)}" if kind == "share" else REMEMBERED[value]


def _in_words(share: str) -> str:
    """Returns one share, or the most frequent of a list with the layers that have another."""
    shares = share.split(":")
    most = max(dict.fromkeys(shares), key=shares.count)
    others = dict.fromkeys(one for one in shares if one != most)
    parts = {one: ", ".join(str(layer) for layer, own in enumerate(shares) if own == one) for one in others}
    return ", ".join([most, *(f"{one} in layer {layers}" for one, layers in parts.items())])


def _share(item: Arm, num_layers: int) -> float | list[float]:
    if item.kind == "layer":
        return [float(layer == int(item.value)) for layer in range(num_layers)]
    return share_of(item.value, num_layers) if item.kind == "share" else 1.0


def check_models(models: Sequence[EvaluatedModel], options: FoldStabilityOptions) -> dict[str, int]:
    """Returns the token of each model's sink. Raises `ValueError` for models and shares that can't be measured."""
    sinks = find_sinks(models, options)
    for model in models:
        for share in options.shares:
            check_arm(model.config, share, sinks[model.name], options.segment_length)
    return sinks


def _layers(name: str, results: Results) -> Table:
    """Returns share 1's traces by layer: in segment 2, whose memory is the first, and in the last that is traced."""
    traces = key_by(select(results["traces"], model=name, **PAPER_FOLD), "layer", "segment")
    last = max(segment for _, segment in traces)
    columns = ["layer", "norm of its output for the sink", "for a text's tokens, segment 1", f"segment {last + 1}"]
    columns += [f"{what}, segment {number + 1}" for what in ("attention on memory", "alike") for number in (1, last)]
    rows = []
    for layer, norm in enumerate(results["sink_norms"][name]):
        norms = [f"{traces[layer, segment]['norm']:,.0f}" for segment in (0, last)]
        shares = [f"{traces[layer, s][field]:.2f}" for field in ("on_memory", "alike") for s in (1, last)]
        rows.append([layer, f"{norm:,.0f}", *norms, *shares])
    return Table(f"{shown_name(name, results)}: the layers with share 1 (norms are medians)", columns, rows)


def _draw_excess(axes: Any, name: str, arms: Sequence[dict[str, Any]]) -> None:
    control_S = np.array(next(arm["losses"] for arm in arms if label_of(arm["kind"], arm["value"]) == CONTROL))
    shown = [arm for arm in arms if arm["kind"] != "layer" and label_of(arm["kind"], arm["value"]) != CONTROL]
    for number, arm in enumerate(shown):
        style = {"color": "tab:red", "linewidth": 2.6} if select([arm], **PAPER_FOLD) else {"color": f"C{number % 10}"}
        style |= {"linestyle": "--"} if arm["kind"] == "remedy" else {}
        axes.plot(np.array(arm["losses"]) - control_S, **style, label=label_of(arm["kind"], arm["value"]))
    _symlog(axes)
    axes.set_ylim(top=1000)  # leaves room for the legend
    finish(axes, f"{name}: loss by segment", "segment, from 0", f"nats a token above {CONTROL}")
    axes.legend(fontsize=7, loc="upper left", ncols=2)


def _symlog(axes: Any) -> None:
    axes.set_yscale("symlog", linthresh=0.1)
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_layers(axes: Any, arms: Sequence[dict[str, Any]]) -> None:
    colors = ["tab:red" if arm["diverges"] else "tab:blue" for arm in arms]
    axes.bar(range(len(arms)), [arm["late"] for arm in arms], color=colors)
    _symlog(axes)
    title = "share 1 in one layer alone (red: diverges)"
    finish(axes, title, "layer", f"nats a token above {CONTROL}, last quarter")
    axes.grid(False, axis="x")


def _draw_trace(axes: Any, traces: Sequence[dict[str, Any]], field: str, title: str) -> None:
    num_layers, num_segments = (1 + max(one[name] for one in traces) for name in ("layer", "segment"))
    value_LS = np.full((num_layers, num_segments), np.nan)
    for one in traces:
        value_LS[one["layer"], one["segment"]] = one[field]
    image = axes.imshow(value_LS, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="magma")
    axes.figure.colorbar(image, ax=axes)
    axes.set(xlabel="segment, from 0", ylabel="layer")
    axes.set_title(f"share 1: {title}", fontsize=10)
