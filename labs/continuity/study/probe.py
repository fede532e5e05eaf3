"""A continuity experiment on models side by side, as a task of the runner."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from condense.eval.models import load_models
from condense.eval.options import identify
from condense.eval.results import Table, some_table
from condense.eval.results_store import Key
from condense.eval.runner import Results, Task

from ..model import ContinuousLM
from . import pictures
from .aggregation import answers, figure
from .control import control_table
from .engine import Reader, Record
from .items import Item
from .options import ProbeOptions
from .runs import Figures, over_runs, runs_table
from .timing import NUM_TIMED, speed

OWN_DATA = "the package's own"


class ProbedModel(NamedTuple):
    """`described` identifies the model in the settings and in the results."""

    name: str
    described: dict[str, Any]
    reader: Reader


class Measurement(NamedTuple):
    """An item on a model; without an item, the timing of the data set's items."""

    model: ProbedModel
    item: Item | None


class Probe(Task[Measurement]):
    """An experiment. A subclass defines its items, the summary of one model's records, and the tables of all models.

    `about` explains it in the report, and `varied` labels the axis of the factor. `data_set` names its data set, if it
    has one. `above_one` are the figures that may exceed 1. Raises `ValueError` for options that do not apply.
    """

    about: ClassVar[str]
    varied: ClassVar[str]
    data_set: ClassVar[str | None] = None
    templates: ClassVar[tuple[str, ...]] = ("sentence",)
    has_spans: ClassVar[bool] = False
    can_be_timed: ClassVar[bool] = False
    folded_only: ClassVar[bool] = False
    above_one: ClassVar[tuple[str, ...]] = ()
    Options = ProbeOptions

    def __init__(self, options: ProbeOptions, models: Sequence[ProbedModel]):
        self.check(options)
        for model in models:
            if self.folded_only and not model.reader.lm.folded:
                raise ValueError(f"{model.name} is a stock model and has no memory to probe: pass folded ones.")
        self.options, self.models, self.set_items = options, models, self.prompts(options)

    @classmethod
    def load(cls, options: ProbeOptions) -> "Probe":
        cls.check(options)
        cls.prompts(options)  # refuses data of another form before a model is loaded
        return cls(options, load_probed(options))

    @classmethod
    def name(cls) -> str:
        return cls.kind.removeprefix("probe_")

    @classmethod
    def check(cls, options: ProbeOptions) -> None:
        """Raises `ValueError` for options that do not apply to this experiment."""
        if options.template not in cls.templates:
            raise ValueError(
                f"template={options.template!r} is unknown to {cls.name()}: choose {' or '.join(cls.templates)}."
            )
        if options.spans != "exact" and not cls.has_spans:
            raise ValueError(f"spans={options.spans!r} belongs to counting, events and sums: leave it out here.")
        if cls.data_set is None and (options.data is not None or options.limit is not None):
            raise ValueError(f"the probe {cls.name()} has no data set: leave out --data and --limit.")
        if options.timed and not cls.can_be_timed:
            raise ValueError(f"the probe {cls.name()} has no data set to time: leave out --speed.")

    @classmethod
    @abstractmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        """Returns the items, the same for every model."""

    @classmethod
    def record(cls, reader: Reader, item: Item) -> Record:
        """Returns the record of one item on one model."""
        return reader.record(item)

    @classmethod
    @abstractmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        """Returns the figures of one model."""

    @classmethod
    @abstractmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        """Returns the figures that are compared over runs; figures of a model that does not answer are None."""

    @classmethod
    @abstractmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        """Returns the tables of all models, from their summaries by name."""

    def settings(self) -> dict[str, Any]:
        return identify(self.options) | {
            "probe": self.name(),
            "data": str(self.options.data or OWN_DATA),
            "items": _hash([asdict(item) for item in self.set_items]),
            "models": [model.described for model in self.models],
        }

    def items(self) -> list[Measurement]:
        timed = [None] if self.options.timed else []
        return [Measurement(model, item) for model in self.models for item in [*self.set_items, *timed]]

    def key(self, item: Measurement) -> Key:
        if item.item is None:
            return {"model": item.model.name, "timed": NUM_TIMED}
        return {"model": item.model.name, "item": item.item.name, "group": item.item.group}

    def measure(self, item: Measurement) -> Record:
        if item.item is None:
            return speed(item.model.reader, self.set_items)
        return self.record(item.model.reader, item.item)

    def summarise(self, measured: Sequence[tuple[Measurement, Record]]) -> dict[str, Any]:
        """Returns `models`, each with its description, `summary`, `records`, and `speed` if it was measured.

        `runs` has the figures of models with several runs: see `over_runs`.
        """
        models = []
        for model in self.models:
            mine = [(item, record) for item, record in measured if item.model.name == model.name]
            records = [record for (_, item), record in mine if item is not None]
            timed = [("speed", record) for (_, item), record in mine if item is None]
            models.append(model.described | {"summary": self.summary(records), "records": records} | dict(timed))
        runs = over_runs({model["name"]: self.figures(model["summary"]) for model in models}, self.above_one)
        return {"models": models} | ({"runs": runs} if runs else {})

    def results(self, settings: dict[str, Any], measured: Sequence[tuple[Measurement, Record]]) -> Results:
        asked = {name: settings[name] for name in ("data", "limit", "template", "spans", "classes")}
        return {**asked, "about": self.about, **self.summarise(measured)}

    def rows(self, results: Results) -> list[dict[str, Any]]:
        """Returns a line for each model, item and factor: probabilities of the watched classes and of likely tokens."""
        return [
            {"model": model["name"], **line}
            for model in results["models"]
            for record in model["records"]
            if record["valid"]
            for line in _lines(record)
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        rules = [f", published {what}" for what in ("spans", "classes") if results.get(what) == "published"]
        summaries = {model["name"] + "".join(rules): model["summary"] for model in results["models"]}
        found = cls.summary_tables(summaries) + control_table(
            summaries, {name for name, summary in summaries.items() if not answers(summary)}
        )
        if results.get("runs"):
            found.append(runs_table(results["runs"]))
        speeds, reasons, shorter = list[list[Any]](), list[list[Any]](), list[list[Any]]()
        for model in results["models"]:
            name, records = model["name"], model.get("records", ())  # a published summary has no records
            if "speed_up" in (seconds := model.get("speed", {})):
                speeds.append([name, *(figure(seconds[field], 2) for field in ("one_by_one", "together", "speed_up"))])
            reasons += [[name, reason, number] for reason, number in _reasons(records).items()]
            if shortened := [record for record in records if "left_out" in record]:
                factors = sum(len(record["left_out"]) for record in shortened)
                shorter.append([name, shortened[0]["because"], factors, len(shortened)])
        columns = ["model", "one pass a factor [s]", "together, beginnings read once [s]", "speed-up"]
        because = ["model", "because, for example"]
        return [
            *found,
            *some_table("time for three items", columns, speeds),
            *some_table("records that are not valid", [*because, "records"], reasons[:20]),
            *some_table("factors that are left out", [*because, "factors", "of records"], shorter),
        ]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        pictures.draw(results, cls.varied_in, path)

    @classmethod
    def varied_in(cls, group: str) -> str:
        """Returns the label of the factor's axis in the picture of a group."""
        return cls.varied


def load_probed(options: ProbeOptions) -> list[ProbedModel]:
    """Loads the models and prepares them for continuous inputs."""
    found = []
    for model in load_models(options.models, options.dtype, options.attention):
        lm = ContinuousLM(model.model, options.position_anchor)
        if lm.table is not None and options.position_anchor is None:
            print(f"{model.name} has learned positions: tokens are at the start of their intervals", flush=True)
        own = {
            "position_anchor": lm.position_anchor,
            "attention": model.model.config._attn_implementation,
            "tokenizer": _hash(sorted(model.tokenizer.get_vocab().items())),
        }
        reader = Reader(lm, model.tokenizer, options.spans, options.classes)
        found.append(ProbedModel(model.name, model.describe() | own, reader))
    return found


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _lines(record: Record) -> Iterator[dict[str, Any]]:
    curves = record.get("curves", {}).items()  # probabilities of classes, or a distance
    columns = {name if name == "distance" else f"p({name})": curve for name, curve in curves}
    columns |= {f"token({name})": curve for name, curve in record.get("likely", {}).items()}
    columns |= {name: record[name] for name in ("distance", "nearest", "same_top", "recall", "found") if name in record}
    for number, factor in enumerate(record["factors"]):
        named = {"group": record["group"], "item": record["name"], "factor": factor}
        yield named | {name: curve[number] for name, curve in columns.items()}


def _reasons(records: Sequence[Record]) -> dict[str, int]:
    """Returns an example of each kind of reason, with its number of records. Kinds ignore quoted words and numbers."""
    kinds: dict[str, tuple[str, int]] = {}
    for record in records:
        if not record["valid"]:
            words = [word for word in record["reason"].split() if "'" not in word and '"' not in word]
            kind = " ".join(word for word in words if not word.isdecimal())[-40:]
            kinds[kind] = (record["reason"], kinds.get(kind, ("", 0))[1] + 1)
    return dict(kinds.values())
