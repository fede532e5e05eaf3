"""`condense probe`: one experiment, or all of them, on models side by side."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from condense.continuity import ContinuousLM

from ..models import load_subjects
from ..records import Records, open_records
from ..results import circumstances, write_results
from .engine import Reader, Record
from .experiment import SET, Options
from .experiments import EXPERIMENTS, WITH_DATA
from .items import Item
from .prompts import COUNTING_TEMPLATES
from .show import draw

NUM_TIMED = 3  # items that the speed-up is measured on


def probe(
    name: str,
    models: Sequence[str],
    output: Path,
    data: Path | None = None,
    limit: int | None = None,
    template: str = "sentence",
    position_anchor: str | None = None,
    dtype: str = "float32",
    attention: str = "auto",
    timed: bool = False,
) -> dict[str, Any]:
    """Runs one experiment on each model (NAME=SOURCE or SOURCE), and writes JSON, CSV and plots into `output`.

    data: a file in the form of the experiment's own data set. limit: the first so many of its records (of pairs of
    objects 50 where there is none). template: of
    counting, "sentence" or "listed". timed: measure also what reading shared beginnings once and running factors
    together saves. Started again, it goes on where it was stopped.

    Returns what the JSON holds: under `models`, for each, its description, `summary` and `records`.

    Raises `ValueError` for an unknown experiment, options that do not apply to it, data of another form, and models
    that can't be probed.
    """
    options = Options(data, limit, template)
    _check(name, options, timed)
    return _run(name, _candidates(models, dtype, attention, position_anchor), output, options, timed)


def probe_all(
    models: Sequence[str],
    output: Path,
    limit: int | None = None,
    template: str = "sentence",
    position_anchor: str | None = None,
    dtype: str = "float32",
    attention: str = "auto",
    timed: bool = False,
) -> dict[str, dict[str, Any]]:
    """Every experiment on each model; `memory` on the folded ones. The options as of `probe`, where they apply."""
    _check("counting", Options(None, limit, template), timed)
    candidates = _candidates(models, dtype, attention, position_anchor)
    found = {}
    for name in EXPERIMENTS:
        chosen = [one for one in candidates if name != "memory" or one.reader.lm.folded]
        options = Options(None, limit if name in WITH_DATA else None, template if name == "counting" else "sentence")
        if chosen:
            found[name] = _run(name, chosen, output, options, timed and name == "counting")
    return found


class Candidate(NamedTuple):
    name: str
    described: dict[str, Any]
    reader: Reader


def _candidates(models: Sequence[str], dtype: str, attention: str, position_anchor: str | None) -> list[Candidate]:
    found = []
    for subject in load_subjects(list(models), dtype, attention):
        lm = ContinuousLM(subject.model, position_anchor)
        own = {
            "position_anchor": lm.position_anchor,
            "attention": subject.model.config._attn_implementation,
            "tokenizer": _hash(sorted(subject.tokenizer.get_vocab().items())),
        }
        found.append(Candidate(subject.name, subject.describe() | own, Reader(lm, subject.tokenizer)))
    return found


def _check(name: str, options: Options, timed: bool) -> None:
    """Raises `ValueError` for what does not apply."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no probe {name!r}: choose one of {', '.join(EXPERIMENTS)}, or all.")
    if options.template not in COUNTING_TEMPLATES or options.template == "apart":
        raise ValueError(f"template={options.template!r}: choose sentence or listed.")
    if options.template != "sentence" and name != "counting":
        raise ValueError(f"template={options.template!r} belongs to counting: leave it out for {name}.")
    if name not in WITH_DATA and (options.data is not None or options.limit is not None):
        raise ValueError(f"the probe {name} has no data set: leave out --data and --limit.")
    if timed and (name not in WITH_DATA or name == "memory"):
        raise ValueError(f"the probe {name} has no data set to time: leave out --speed.")


def _run(name: str, candidates: Sequence[Candidate], output: Path, options: Options, timed: bool) -> dict[str, Any]:
    for candidate in candidates:
        if name == "memory" and not candidate.reader.lm.folded:
            raise ValueError(f"{candidate.name} is a stock model and has no memory to probe: pass folded ones.")
    experiment = EXPERIMENTS[name]
    items = experiment.items(options)
    asked = {"data": str(options.data or "the package's own"), "limit": options.limit, "template": options.template}
    settings = {
        "probe": name,
        **asked,
        "items": _hash([asdict(item) for item in items]),
        "models": [candidate.described for candidate in candidates],
    }
    path = output / f"probe_{name}"
    with open_records(path.with_suffix(".records.jsonl"), settings) as records:
        found = [_probed(name, items, candidate, records, timed) for candidate in candidates]
        results = {"kind": path.name, **circumstances(), **asked, "about": experiment.about, "models": found}
        write_results(path, results, list(_lines(found)))
        draw(results, experiment.varied, path)
    return results


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _probed(name: str, items: Sequence[Item], candidate: Candidate, records: Records, timed: bool) -> dict[str, Any]:
    rows, reader = [], candidate.reader
    for item in tqdm(items, desc=f"{name}, {candidate.name}", unit="item"):
        key = {"model": candidate.name, "item": item.name, "group": item.group}
        rows.append(records.get(key, partial(EXPERIMENTS[name].record, reader, item)))
    figures = candidate.described | {"summary": EXPERIMENTS[name].summary(rows), "records": rows}
    if timed:
        timing = {"model": candidate.name, "timed": NUM_TIMED}
        figures["speed"] = records.get(timing, partial(speed, reader, items, rows))
    return figures


def speed(reader: Reader, items: Sequence[Item], rows: Sequence[Record]) -> dict[str, Any]:
    """Seconds for the first valid items of the set, if there are any: one pass a factor, and as the probes run."""
    chosen = [item for item, row in zip(items, rows, strict=True) if row["valid"] and item.group == SET][:NUM_TIMED]
    if not chosen:
        return {"items": 0}
    seconds = {"one_by_one": 0.0, "together": 0.0}
    for item in chosen:
        sentences = reader.sentences(item)
        reader.probabilities(sentences[:2])  # warm
        start = time.perf_counter()
        for sentence in sentences:
            reader.probabilities([sentence], reuse_prefix=False)
        seconds["one_by_one"] += time.perf_counter() - start
        start = time.perf_counter()
        reader.probabilities(sentences)
        seconds["together"] += time.perf_counter() - start
    return seconds | {"items": len(chosen), "speed_up": seconds["one_by_one"] / seconds["together"]}


def _lines(models: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line per model, item and factor: probabilities of the classes that are watched and of likely tokens."""
    for model in models:
        for record in model["records"]:
            if not record["valid"]:
                continue
            columns = {f"p({name})": curve for name, curve in record.get("curves", {}).items()}
            columns |= {f"token({name})": curve for name, curve in record.get("likely", {}).items()}
            columns |= {name: record[name] for name in ("distance", "same_top", "recall", "found") if name in record}
            for number, factor in enumerate(record["factors"]):
                place = {"model": model["name"], "group": record["group"], "item": record["name"], "factor": factor}
                yield place | {name: curve[number] for name, curve in columns.items()}
