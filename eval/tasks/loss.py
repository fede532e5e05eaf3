"""The loss of models on the same texts, above that of the first model: what a memory costs, trained or not.

Each model reads a text in its own way: a stock model with full attention, a folded one with its memory. With `window`,
the first stock model is read through StreamingLLM's window, too (see `window_attention`). All have one tokenizer.
Losses by position in one longer text show whether a memory drifts.

Axes: N tokens of a text.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..charts import finish
from ..decoding import max_positions
from ..intervals import format_interval, interval
from ..models import EvaluatedModel
from ..overview import Figure, remark_of
from ..results import Table, groups_of, picture
from ..results_store import Key, Record
from ..runner import Results
from ..tables import select, table
from .evaluation import Evaluation, shown_name
from .options import LossOptions
from .window_attention import WINDOW_SINKS, attend_to_window
from .window_model import check_window, window_name
from .windows import by_blocks, head_losses, parts_of, read_texts

OWN, WINDOW = "own", "window"
DIGITS = 5  # of a stored loss


class Reading(NamedTuple):
    """A text of a source, read by a model in its own way or through a window; `text` is None for the longer one."""

    model: str
    way: str
    source: str
    text: int | None
    tokens: int


class Loss(Evaluation[Reading]):
    """A record has the `losses` [N - 1] of a text's tokens from the second on.

    `texts` are token ids [N] by source, the longer one last. Raises `ValueError` for models that can't be compared.
    """

    kind = "loss"
    unit = "reading"
    Options = LossOptions

    def __init__(self, options: LossOptions, models: Sequence[EvaluatedModel], texts: dict[str, list[torch.Tensor]]):
        super().__init__(options, models)
        check_models(models, options)
        self.texts = texts
        self.first = max((model.segment_length or 0 for model in models), default=0)
        if options.num_tokens <= self.first + 1:
            raise ValueError(
                f"--tokens {options.num_tokens} end in the first segment of {self.first}, which needs no memory: read "
                "more tokens."
            )

    @classmethod
    def load(cls, options: LossOptions) -> "Loss":
        models = cls.load_models(options)
        check_models(models, options)  # before any text is read
        return cls(
            options, models, {source: find_texts(models[0].tokenizer, source, options) for source in options.data}
        )

    def settings(self) -> dict[str, Any]:
        digests = {
            source: [hashlib.sha256(ids_N.numpy().tobytes()).hexdigest() for ids_N in texts]
            for source, texts in self.texts.items()
        }
        return super().settings() | {"texts": digests, "first": self.first}

    def items(self) -> list[Reading]:
        found = []
        for model, way in self._ways():  # one model is in memory at a time
            for source, (*pieces, longer) in self.texts.items():
                found += [Reading(model.name, way, source, number, len(ids_N)) for number, ids_N in enumerate(pieces)]
                if self.options.position_tokens:
                    known = max_positions(model.config) if way == OWN and model.segment_length is None else None
                    found.append(Reading(model.name, way, source, None, min(len(longer), known or len(longer))))
        return found

    def _ways(self) -> Iterator[tuple[EvaluatedModel, str]]:
        window = self.options.window
        for model in self.models:
            yield model, OWN
            if window is not None and model.segment_length is None:
                yield model, WINDOW
                window = None

    def num_tokens(self, item: Reading) -> int:
        """Returns the positions that a reading needs."""
        least = self.options.window if item.way == WINDOW else 2 * (self.model_of(item).segment_length or 0)
        return min(item.tokens, least or item.tokens)

    def model_of(self, item: Reading) -> EvaluatedModel:
        return next(model for model in self.models if model.name == item.model)

    def key(self, item: Reading) -> Key:
        return item._asdict()

    def measure(self, item: Reading) -> Record:
        model = self.model_of(item).model
        ids_N = self.texts[item.source][-1 if item.text is None else item.text][: item.tokens].to(model.device)
        if item.way == WINDOW:
            assert self.options.window is not None
            with attend_to_window(model, self.options.window, WINDOW_SINKS):
                loss_N = text_losses(model, ids_N)
        else:
            loss_N = text_losses(model, ids_N)
        if not np.isfinite(loss_N).all():
            raise ValueError(f"{item.model}: losses are not finite; use another dtype or checkpoint.")
        return {"losses": np.round(loss_N.astype(np.float64), DIGITS).tolist()}

    def summarise(self, measured: Sequence[tuple[Reading, Record]]) -> dict[str, Any]:
        """Returns `costs` by source, with the mean over the texts, its 95 % t interval and `by_text`, the same
        `above_window` if there is one, and `by_position`: means of `block` tokens each."""
        losses = {item: np.array(record["losses"]) for item, record in measured}
        found: dict[str, Any] = {"costs": [], "by_position": []}
        ways = [(model.name, way) for model, way in self._ways()]
        window = next((one for one in ways if one[1] == WINDOW), None)
        for source in self.texts:
            means = {one: self._means(losses, *one, source) for one in ways}
            for name, way in ways:
                about = {"model": name, "way": way, "source": source}
                own, reference = means[name, way], means[self.models[0].name, OWN]
                cost = about | {"loss": float(np.mean(own))} | _above(own, reference)
                if window is not None:
                    cost["above_window"] = _above(own, means[window])
                found["costs"].append(cost)
                found["by_position"] += [
                    about | by_blocks(loss_N, len(self.texts[source][-1]) - 1)
                    for item, loss_N in losses.items()
                    if item[:4] == (*about.values(), None)
                ]
        return found

    def _means(self, losses: dict[Reading, np.ndarray], name: str, way: str, source: str) -> list[float]:
        """Returns the mean loss of each text from the longest first segment's end on."""
        pieces = self.texts[source][:-1]
        readings = [Reading(name, way, source, number, len(ids_N)) for number, ids_N in enumerate(pieces)]
        return [float(losses[one][max(0, self.first - 1) :].mean()) for one in readings]

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """Returns the costs, then the losses by position: means from the token `first` on, before `end`."""
        kept = ("model", "way", "source", "loss", "cost", "low", "high")
        found = [{name: cost[name] for name in kept} | _of_window(cost) for cost in results["costs"]]
        for curve in results["by_position"]:
            about, block = {name: curve[name] for name in ("model", "way", "source")}, curve["block"]
            for first, loss in parts_of(curve):
                found.append({**about, "loss": loss, "first": first, "end": min(first + block, curve["tokens"])})
        return found

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        found, first = [], results["models"][0]["name"]
        for cost in results["costs"]:
            if (name := cost["model"]) != first:
                measure = f"loss above {first}'s on {Path(cost['source']).name} [nats/token]"
                figures = (cost[field] for field in ("cost", "low", "high"))
                found.append(Figure(name, measure, *figures, digits=3, remark=remark_of(name, results)))
        return found

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        reference, number = results["models"][0]["name"], results["num_texts"]
        rows = []
        for cost in results["costs"]:
            above = [_format_cost(cost), *([_format_cost(cost["above_window"])] if "above_window" in cost else [])]
            rows.append([Path(cost["source"]).name, label_of(cost, results), f"{cost['loss']:.4f}", *above])
        columns = ["source", "model", "loss", f"above {reference}"]
        if results["window"] is not None:
            columns.append("above the window")
        title = (
            f"loss [nats a token] of tokens {results['first']:,} to {results['num_tokens']:,} of at most {number} "
            "texts a source; 95 % t interval over the texts"
        )
        found = [Table(title, columns, rows)]
        for (source,), curves in groups_of(results["by_position"], "source").items():
            about = f"means of {curves[0]['block']:,} tokens from the one given on"
            lines = [
                {"model": label_of(curve, results)} | {f"{first:,}": f"{loss:.3f}" for first, loss in parts_of(curve)}
                for curve in curves
            ]
            found.append(table(f"{Path(source).name}: loss by position, {about}", lines))
        return found

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws the costs of the sources, and below them the losses by position if they were measured."""
        sources = list(dict.fromkeys(cost["source"] for cost in results["costs"]))
        rows, ways = 2 if results["by_position"] else 1, len(results["costs"]) / len(sources)
        size = (2 + 3.2 * len(sources), 1.1 + 0.34 * ways + (3 if rows == 2 else 0))
        with picture(path, rows=rows, columns=len(sources), figsize=size, squeeze=False) as panels:
            for column, source in enumerate(sources):
                costs = [one for one in select(results["costs"], source=source) if one["cost"]]
                _draw_costs(panels[0, column], Path(source).name, costs, results, with_names=column == 0)
                if curves := select(results["by_position"], source=source):
                    _draw_positions(panels[1, column], curves, results)


def _above(own: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Returns how far losses are above others of the same texts: the mean, its 95 % t interval, and `by_text`."""
    by_text = [one - other for one, other in zip(own, others, strict=True)]
    cost, low, high = interval(by_text)
    return {"cost": cost, "low": low, "high": high, "by_text": by_text}


def _format_cost(above: dict[str, Any]) -> str:
    return format_interval((above["cost"], above["low"], above["high"]), "+.4f") if any(above["by_text"]) else ""


def _of_window(cost: dict[str, Any]) -> dict[str, Any]:
    above = cost.get("above_window", {})
    return {f"{name}_above_window": above[name] for name in ("cost", "low", "high") if above}


def check_models(models: Sequence[EvaluatedModel], options: LossOptions) -> None:
    """Raises `ValueError` for models with different tokenizers, and for a window without a stock model."""
    check_window(options.window, models, options.device_map)
    vocabulary = models[0].tokenizer.get_vocab()
    for model in models[1:]:
        if model.tokenizer.get_vocab() != vocabulary:
            raise ValueError(
                f"{model.name} has another tokenizer than {models[0].name}, so their losses are of other tokens: "
                "compare models with one tokenizer."
            )


def find_texts(tokenizer: Any, source: str, options: LossOptions) -> list[torch.Tensor]:
    """Returns texts [N] of `num_tokens` tokens, evenly spread over a source's documents, and its longest document up to
    `position_tokens`. Raises `ValueError` if no document is long enough."""
    documents = read_texts(tokenizer, [source], text_field=options.text_field)
    pieces = [
        piece for ids_N in documents for piece in ids_N.split(options.num_tokens) if len(piece) == options.num_tokens
    ]
    longest = max(documents, key=len)
    if not pieces:
        raise ValueError(
            f"data {source}: the longest document has {len(longest):,} tokens, and {options.num_tokens:,} are needed: "
            "pass a longer text, or a lower --tokens."
        )
    number = min(options.num_texts, len(pieces))
    return [*(pieces[one * len(pieces) // number] for one in range(number)), longest[: options.position_tokens]]


@torch.no_grad()
def text_losses(model: Any, ids_N: torch.Tensor) -> np.ndarray:
    """Returns the losses [N - 1], at least in float32, of tokens 1 to N - 1."""
    hidden_ND = model.base_model(ids_N[None, :-1], use_cache=False).last_hidden_state[0]
    return head_losses(model, hidden_ND, ids_N[1:]).cpu().numpy()


def label_of(one: dict[str, Any], results: Results) -> str:
    name = shown_name(one["model"], results)
    return name if one["way"] == OWN else window_name(name, results["window"])


def _in_two_lines(label: str) -> str:
    return label.replace(", window", ",\nwindow")


def _draw_costs(panel: Any, source: str, costs: Sequence[dict[str, Any]], results: Results, with_names: bool) -> None:
    for place, cost in enumerate(costs):
        low, high = ([abs(cost[end] - cost["cost"])] if cost[end] is not None else [0] for end in ("low", "high"))
        panel.barh(place, cost["cost"], xerr=[low, high], color=f"C{place % 10}", height=0.6)
    labels = [_in_two_lines(label_of(cost, results)) for cost in costs]
    panel.set_yticks(range(len(costs)), labels if with_names else [""] * len(costs), fontsize=8)
    panel.invert_yaxis()
    panel.axvline(0, color="black", linewidth=1)
    finish(panel, source, f"nats a token above {results['models'][0]['name']}", fontsize=8)
    panel.grid(False, axis="y")


def _draw_positions(panel: Any, curves: Sequence[dict[str, Any]], results: Results) -> None:
    for number, curve in enumerate(curves):
        middles = [first + curve["block"] / 2 for first, _ in parts_of(curve)]
        color = f"C{(number - 1) % 10}" if number else "black"  # of the reference
        panel.plot(middles, curve["losses"], label=_in_two_lines(label_of(curve, results)), linewidth=1.3, color=color)
    panel.tick_params(labelsize=7)
    finish(panel, x="position in the text [tokens]", y="loss [nats a token]", legend=6, fontsize=8)
