"""`condense probe`: one experiment, or all of them, on models side by side."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from condense.continuity import ContinuousLM

from ..models import Subject, load_subjects
from ..records import Records
from ..results import circumstances, write_results
from .counts import COUNTING, EVENTS
from .engine import Reader, Record
from .experiment import SET, Experiment, Options
from .items import Item
from .memory import MEMORY
from .prompts import COUNTING_TEMPLATES
from .show import draw
from .space import BOOLEAN_PROBE, SPACE
from .sums import SUMS
from .transformations import DENSITY, SCALING, TRANSLATION

EXPERIMENTS: dict[str, Experiment] = {
    "counting": COUNTING,
    "events": EVENTS,
    "sums": SUMS,
    "space": SPACE,
    "boolean": BOOLEAN_PROBE,
    "translation": TRANSLATION,
    "scaling": SCALING,
    "density": DENSITY,
    "memory": MEMORY,
}
WITH_DATA = {"counting": "words", "events": "tutorials", "sums": "sums", "space": "objects", "memory": "words"}
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

    data: a file in the form of the experiment's own data set. limit: the first so many of its records. template: of
    counting, "sentence" or "listed". timed: measure also what reading shared beginnings once and running factors
    together saves. Started again, it goes on where it was stopped.

    Returns what the JSON holds: under `models`, for each, its description, `summary` and `records`.

    Raises `ValueError` for an unknown experiment, data of another form, and models that can't be probed.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no probe {name!r}: choose one of {', '.join(EXPERIMENTS)}, or all.")
    if template not in COUNTING_TEMPLATES or template == "apart":
        raise ValueError(f"template={template!r}: choose sentence or listed.")
    if data is not None and name not in WITH_DATA:
        raise ValueError(f"the probe {name} has no data set: leave out --data.")
    experiment, options = EXPERIMENTS[name], Options(data, limit, template)
    items = experiment.items(options)
    subjects = load_subjects(list(models), dtype, attention)
    readers = [_reader(subject, name, position_anchor) for subject in subjects]
    settings = {
        "probe": name,
        "models": [subject.describe() for subject in subjects],
        "position_anchor": [reader.lm.position_anchor for reader in readers],
        "items": hashlib.sha256(json.dumps([asdict(item) for item in items]).encode()).hexdigest()[:16],
    }
    path = output / f"probe_{name}"
    records = Records(path.with_suffix(".records.jsonl"), settings)
    found = [
        _probed(name, items, subject, reader, records, timed) for subject, reader in zip(subjects, readers, strict=True)
    ]
    own = {"data": str(data) if data else "the package's own"} if name in WITH_DATA else {}
    results = {"kind": f"probe_{name}", **circumstances(), **own, "about": experiment.about, "models": found}
    write_results(path, results, list(_lines(found)))
    draw(results, experiment.varied, path)
    return results


def _probed(
    name: str, items: Sequence[Item], subject: Subject, reader: Reader, records: Records, timed: bool
) -> dict[str, Any]:
    rows = []
    for item in tqdm(items, desc=f"{name}, {subject.name}", unit="item"):
        key = {"model": subject.name, "item": item.name, "group": item.group}
        rows.append(records.get(key, partial(EXPERIMENTS[name].record, reader, item)))
    figures = subject.describe() | {
        "position_anchor": reader.lm.position_anchor,
        "summary": EXPERIMENTS[name].summary(rows),
        "records": rows,
    }
    if timed:
        figures["speed"] = records.get({"model": subject.name, "timed": NUM_TIMED}, partial(speed, reader, items, rows))
    return figures


def _reader(subject: Subject, name: str, position_anchor: str | None) -> Reader:
    if name == "memory" and subject.segment_length is None:
        raise ValueError(f"{subject.name} is a stock model and has no memory to probe: pass folded ones.")
    return Reader(ContinuousLM(subject.model, position_anchor), subject.tokenizer)


def probe_all(models: Sequence[str], output: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """Every experiment on each model; `memory` on the folded ones among them."""
    found = {}
    for name in EXPERIMENTS:
        chosen = list(models)
        if name == "memory":
            folded = [subject.segment_length is not None for subject in load_subjects(chosen, attention="auto")]
            chosen = [model for model, one in zip(chosen, folded, strict=True) if one]
        if chosen:
            found[name] = probe(name, chosen, output, **options)
    return found


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


def _lines(models: Sequence[dict[str, Any]]):
    """A line per model, item and factor, with the probability of each class that is watched, or of likely tokens."""
    for model in models:
        for record in model["records"]:
            if not record["valid"]:
                continue
            curves = record.get("curves") or record.get("likely") or {"recall": record.get("recall")}
            for number, factor in enumerate(record["factors"]):
                place = {"model": model["name"], "group": record["group"], "item": record["name"], "factor": factor}
                yield place | {f"p({name})": curve[number] for name, curve in curves.items()}
