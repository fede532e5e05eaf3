"""The cost of folding a stock checkpoint, before any training, by segment length, memory share and sink.

All ways of reading (see `fold_arms`) predict the same tokens of the same texts. A cost is the loss above that of the
stock model with full attention, averaged over a text's tokens from the second segment on. The loss by position in a
longer text shows whether a fold diverges. A folded checkpoint is measured as the stock model of its weights.

Axes: N tokens of a text.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from condense.checks import quantization_of

from ..decoding import max_positions
from ..intervals import interval
from ..models import EvaluatedModel
from ..overview import Figure, remark_of
from ..results_store import Key, Record
from ..runner import Results
from . import fold_shown
from .evaluation import Evaluation
from .fold_arms import FULL, NONE, WINDOW, arm_losses, check_arm, fields_of
from .fold_choice import choose, late_excess
from .fold_shown import data_of, label_of
from .fold_texts import long_texts, own_samples
from .options import FoldCostOptions
from .variants import StockInMemory
from .windows import by_blocks

DIGITS = 5  # of a stored loss


class Reading(NamedTuple):
    """A text, read in one way. `segment_length` is 0 for full attention."""

    model: str
    text: int
    tokens: int
    segment_length: int
    memory: str
    sink: bool


class FoldCost(Evaluation[Reading]):
    """A record has the `losses` [N - 1] of a text's tokens from the second on.

    `texts` are token ids [N] by the name of the model. Raises `ValueError` for models that can't be folded.
    """

    kind = "fold_cost"
    unit = "reading"
    Options = FoldCostOptions
    rows = staticmethod(fold_shown.rows)
    tables = staticmethod(fold_shown.tables)
    draw = staticmethod(fold_shown.draw)

    def __init__(self, options: FoldCostOptions, models: Sequence[EvaluatedModel], texts: dict[str, Any]):
        super().__init__(options, models)
        self.texts, self.sinks = texts, check_models(models, options)
        self.stock = StockInMemory()

    @classmethod
    def load_for(cls, options: FoldCostOptions, output: Path) -> "FoldCost":
        longest = max([*options.segment_lengths, *(() if options.data else options.by_position)])
        if options.num_tokens < 2 * longest:
            raise ValueError(
                f"--tokens {options.num_tokens} end before the second segment of {longest} does: read more, or take "
                "shorter segments."
            )
        least = 2 * max(*options.segment_lengths, *options.by_position)
        task = cls(options, cls.load_models(options), {})
        for model in task.models:
            if options.data:
                source = (options.data, options.text_field, options.num_texts, least)
                task.texts[model.name] = long_texts(model.tokenizer, *source)
            else:
                shape = (options.num_texts, options.num_tokens)
                first = task.sinks[model.name]
                task.texts[model.name] = own_samples(task.stock(model), model, shape, first, options.seed, output)
        return task

    def settings(self) -> dict[str, Any]:
        texts = {
            name: [
                {"tokens": len(ids_N), "sha256": hashlib.sha256(ids_N.numpy().tobytes()).hexdigest()} for ids_N in ids
            ]
            for name, ids in self.texts.items()
        }
        return super().settings() | {"texts": texts, "sinks": self.sinks}

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Reading, Record]]) -> Results:
        return super().results(settings, measured) | {"num_tokens": self.options.num_tokens}

    def items(self) -> list[Reading]:
        return list(dict.fromkeys(one for model in self.models for one in self._readings(model.name)))

    @property
    def arms(self) -> list[tuple[str, bool]]:
        """Returns the ways of reading in segments, each without and with sinks."""
        return list(product((NONE, WINDOW, *self.options.shares), (False, True)))

    def _readings(self, name: str) -> Iterator[Reading]:
        options = self.options
        for text, tokens in self._beginnings(name):
            yield Reading(name, text, tokens, 0, FULL, False)
            for length, arm in product(options.segment_lengths, self.arms):
                yield Reading(name, text, tokens, length, *arm)
        if self._position_lengths:
            text, tokens = self._longest(name)
            yield self._longest_in_full(name)
            for length, arm in product(self._position_lengths, self.arms):
                yield Reading(name, text, tokens, length, *arm)

    def _beginnings(self, name: str) -> list[tuple[int, int]]:
        """Returns each text and the tokens that its costs are measured on."""
        return [(text, min(self.options.num_tokens, len(ids_N))) for text, ids_N in enumerate(self.texts[name])]

    @property
    def _position_lengths(self) -> list[int]:
        return [length for length in self.options.by_position if length]

    def _longest(self, name: str) -> tuple[int, int]:
        """Returns the text of the losses by position, and its tokens."""
        sizes = [len(ids_N) for ids_N in self.texts[name]]
        return sizes.index(max(sizes)), min(self.options.position_tokens, max(sizes))

    def _longest_in_full(self, name: str) -> Reading:
        """Returns the reading of that text with full attention, up to the model's last position."""
        text, tokens = self._longest(name)
        (model,) = (model for model in self.models if model.name == name)
        return Reading(name, text, min(tokens, max_positions(model.config) or tokens), 0, FULL, False)

    def num_tokens(self, item: Reading) -> int:
        """Returns the positions that a reading needs: those of two segments, unless attention is full."""
        return min(item.tokens, 2 * item.segment_length or item.tokens)

    def model_of(self, item: Reading) -> EvaluatedModel:
        return next(model for model in self.models if model.name == item.model)

    def positions_exceeded(self, item: Reading) -> int | None:
        known = max_positions(self.model_of(item).config)
        return known if known is not None and self.num_tokens(item) > known else None

    def key(self, item: Reading) -> Key:
        return item._asdict()

    def in_words(self, item: Reading) -> str:
        segments = f" in segments of {item.segment_length}" if item.segment_length else ""
        return f"{item.model}, {label_of(item.memory, item.sink)}, {item.tokens:,} tokens{segments}"

    def measure(self, item: Reading) -> Record:
        model = self.model_of(item)
        ids_N = self.texts[item.model][item.text][: item.tokens]
        sink, attention = self.sinks[item.model] if item.sink else None, self.options.attention
        loss_N = arm_losses(self.stock(model), item.memory, sink, ids_N, item.segment_length, attention).cpu().numpy()
        if not np.isfinite(loss_N).all():
            raise ValueError(f"{item.model}: losses are not finite; use another dtype or checkpoint.")
        return {"losses": np.round(loss_N.astype(np.float64), DIGITS).tolist()}

    def summarise(self, measured: Sequence[tuple[Reading, Record]]) -> dict[str, Any]:
        """Returns `costs`, `by_position` and `choices`.

        A cost has the mean over the texts, its 95 % t interval, and `by_text`. `late` is the largest excess over no
        memory at the end of a text, and `read` the tokens of the longest (see `fold_choice`). Losses by position are
        means of `block` tokens each.
        """
        losses = {item: np.array(record["losses"]) for item, record in measured}
        found: dict[str, Any] = {"costs": [], "by_position": [], "choices": []}
        for model in self.models:
            for length in self.options.segment_lengths:
                costs = [self._cost(model.name, length, *arm, losses) for arm in self.arms]
                found["costs"] += costs
                found["choices"].append(self._choice(model, costs))
            if self._position_lengths:
                found["by_position"] += self._by_position(model.name, losses)
        return found

    def _cost(
        self, name: str, length: int, memory: str, sink: bool, losses: dict[Reading, np.ndarray]
    ) -> dict[str, Any]:
        def late(text: int, tokens: int) -> float:
            own, none = (Reading(name, text, tokens, length, one, sink) for one in (memory, NONE))
            return late_excess(losses[own], losses[none])

        beginnings = self._beginnings(name)
        full = [losses[Reading(name, *one, 0, FULL, False)][length:].mean() for one in beginnings]
        own = [losses[Reading(name, *one, length, memory, sink)][length:].mean() for one in beginnings]
        by_text = [float(one - other) for one, other in zip(own, full, strict=True)]
        cost, low, high = interval(by_text)
        excess, read = float(np.mean([late(*one) for one in beginnings])), max(tokens for _, tokens in beginnings)
        if length in self._position_lengths:
            text, tokens = self._longest(name)
            excess, read = max(excess, late(text, tokens)), max(read, tokens)
        return {
            "model": name, "segment_length": length, "memory": memory, "sink": sink, "cost": cost, "low": low,
            "high": high, "loss": float(np.mean(own)), "stock_loss": float(np.mean(full)), "by_text": by_text,
            "late": excess, "read": read,
        }  # fmt: skip

    def _by_position(self, name: str, losses: dict[Reading, np.ndarray]) -> list[dict[str, Any]]:
        (text, tokens), found = self._longest(name), []
        ways = product(self._position_lengths, self.arms)
        for one in [self._longest_in_full(name), *(Reading(name, text, tokens, length, *arm) for length, arm in ways)]:
            about = {"model": name, "segment_length": one.segment_length, "memory": one.memory, "sink": one.sink}
            found.append({**about, **by_blocks(losses[one], tokens), "tokens": one.tokens})
        return found

    def _choice(self, model: EvaluatedModel, costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        cost, why = choose(costs)
        kept = {name: cost[name] for name in ("model", "segment_length", "memory", "sink", "cost", "low", "high")}
        fields = fields_of(cost["memory"], self.sinks[model.name] if cost["sink"] else None, model.config)
        return kept | {name: fields[name] for name in ("memory_share", "sink_token_id")} | {"why": why}

    @classmethod
    def overview(cls, results: Results) -> list[Figure]:
        """Returns the cost of each model's choices."""
        found = []
        for choice in results["choices"]:
            length, figures = choice["segment_length"], (choice[name] for name in ("cost", "low", "high"))
            remarks = [label_of(choice["memory"], choice["sink"]), remark_of(choice["model"], results)]
            measure = f"cost of folding in segments of {length} on {data_of(results)} [nats/token]"
            remark = ", ".join(filter(None, remarks))
            found.append(Figure(choice["model"], measure, *figures, digits=3, remark=remark))
        return found


def check_models(models: Sequence[EvaluatedModel], options: FoldCostOptions) -> dict[str, int]:
    """Returns the token of each model's sink. Raises `ValueError` for models and options that can't be measured."""
    sinks = find_sinks(models, options)
    for model in models:
        for length, share in product({*options.segment_lengths, *options.by_position} - {0}, options.shares):
            check_arm(model.config, share, sinks[model.name], length)
    return sinks


def find_sinks(models: Sequence[EvaluatedModel], options: Any) -> dict[str, int]:
    """Returns the token of each model's sink. Raises `ValueError` for models whose folds can't share their weights."""
    if options.device_map is not None:
        raise ValueError(f"--device-map {options.device_map} places one model, not the folds of it: leave it out.")
    sinks = {}
    for model in models:
        config = model.config
        if (method := quantization_of(config)) is not None:
            raise ValueError(f"the weights of {model.name} are quantized ({method}), and its folds can't share them.")
        if getattr(config, "depth", None) is not None:
            raise ValueError(f"{model.name} has a depth block, and no stock model has its weights: pass its source.")
        known = (options.sink_token_id, getattr(config, "sink_token_id", None), config.bos_token_id)
        token = next((one for one in known if one is not None), None)
        if not isinstance(token, int):
            raise ValueError(f"{model.name} has no bos_token_id: pass --sink-token-id, such as the end of a text's.")
        sinks[model.name] = token
    return sinks
