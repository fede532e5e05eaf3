"""One HTML page with the tables and plots of all results in a folder.

It finds the results of the other commands (`passkey.json`, `profile.json`, `probe_NAME.json`, `depth_NAME.json`,
`ablation_NAME.json`, ...) and the logs of training runs, in the folder and its subfolders. It writes
FOLDER/report.html, which needs no other file.
"""

import base64
import json
import struct
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from condense import laboratories
from condense.utils.files import atomic_file, check_not_linked, read_text

from .overview import Figure, Overview, own_results, own_tables, read_harness
from .results import MAKE_ROOM, Table, write_results
from .tasks import TASKS
from .training_report import read_run, runs_table, write_training

SHOWN_BY = TASKS | {
    "healing": "condense.eval.healing.study:Healing",
    "memory": "condense.eval.memory.study:Memory",
    "profile": "condense.eval.benchmark.profile_tables",
    "modules": "condense.eval.benchmark.module_tables",
    "schedules": "condense.eval.benchmark.schedule_tables",
}  # these have `tables`
PNG = b"\x89PNG\r\n\x1a\n"
CSS_PIXELS = 0.72  # per pixel of a picture, which has 150 in an inch
METADATA = ("command", "hardware", "versions", "date")
ABOUT = {
    "passkey": "A number is hidden in irrelevant text, and a question at the end asks for it. An answer counts when "
    "the model's own greedy decoding gives all digits. Prompts are new; lengths are in tokens, answer included.",
    "facts": "Facts stand in order in other text, and a question at the end asks for one word. An answer counts when "
    "the model's own greedy decoding gives exactly its tokens. Lengths are in tokens, answer included. The last such "
    "word is the last place, person or thing of the facts, whichever the question asks for, that it does not name. "
    "Facts are tracked if the answer is right for a reason other than that word or a guess among the others.",
    "recall": "Sentences between irrelevant ones give keys with values, and a question at the end asks about one key. "
    "An answer counts when the model's own greedy decoding gives the value, or all of the key's values in order. The "
    "capacity is the number of pairs up to which at least 90 % of the answers are right, interpolated linearly between "
    "the numbers measured. Folded models also have the size of their memory.",
    "summarization": "Summaries that the models write, against the references.",
    "perplexity": "The gain of the memory, and how far back it reaches: the same tokens, predicted with more and more "
    "text before.",
    "fold_cost": "What folding a stock checkpoint costs before any training: the loss above that of the stock model "
    "with full attention, on the same tokens. With the sink, a token's keys and values stand in place of each memory's "
    "first row; without memory, the token stands before each segment.",
    "loss": "Texts that all models read, each in its own way: the loss above that of the first model, from the second "
    "segment on, and by position in one longer text.",
    "fold_stability": "A text, read by folds of a stock checkpoint before any training: with one memory share in all "
    "layers, with share 1 in one layer alone, and with share 1 and a change to what is remembered. A fold diverges if "
    "its loss in the last quarter of the segments is more than 1 nat a token above that of share 0.",
    "answers": "Prompts of your own, answered by the model's own greedy decoding.",
    "suite": "Benchmarks of long text from lm-evaluation-harness. Benchmarks that generate their texts do so at each "
    "length. For others, a length has the texts that are longer than half of it.",
    "attention": "Scores before softmax over memory and current segment, and how much attention goes to memory.",
    "healing": "A stock checkpoint is folded and trained to use its memory. The cost of folding is the held-out loss "
    "before any training, less the loss of the stock model with full attention.",
    "memory": "Models that differ only in their memory, trained alike from the same random weights: the loss of the "
    "same held-out segments by the segments before them.",
    "profile": "Each point was measured in a separate process, with the weights that the first table names.",
    "modules": "Memory of one training step, as torch's MemTracker counts tensors. Folded models run segment by "
    "segment.",
    "schedules": "Both orders of computation of one folded model, which give the same results. They take turns, repeat "
    "by repeat, in one process per point. auto is the rule by which a model chooses between them.",
    "training": "Logged while training; training.csv and training.json beside this page have every logged line. If "
    "memory helps, later segments have a smaller loss. Speed is summed over all ranks; memory is of the first rank.",
    "harness": "Scores as lm-evaluation-harness wrote them.",
    "overview": "One or a few figures for each model and task; the sections below have the details. Losses of models "
    "with different tokenizers can't be compared. overview.csv and overview.json beside this page have the same data.",
}


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    tables: list[Table]
    pictures: list["Picture"]
    origin: dict[str, Any]  # command, hardware, versions and date, if known


class Picture(NamedTuple):
    """A PNG as base64, and its width on a page, of which its letters have the size of the page's small print."""

    data: str
    width: int  # CSS pixels


def write_report(folder: Path, title: str = "condense") -> Path:
    """Writes the page and returns its path.

    Raises `ValueError` if a folder holds no results or an output file is a link. Input files that are damaged, links or
    from another program are left out and named on the page; it then raises `ValueError` after the page is written.
    """
    import jinja2

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: pass one that holds results.")
    page = folder / "report.html"
    check_not_linked(page, *folder.glob("training*.*"), *folder.glob("overview.*"))
    skipped: dict[str, str] = {}
    sections, overview = [], Overview()
    kinds = (*SHOWN_BY, *(f"{family}{rest}" for family in laboratories.SHOWN_BY for rest in ("", "_*")))
    paths = [path for kind in kinds for path in _files(folder, f"{kind}.json", skipped)]
    for path in paths + own_results(_files(folder, "*.records.jsonl", skipped), SHOWN_BY):
        try:
            sections.append(_describe_result(path, folder, overview, skipped))
        except Exception as error:  # a different program's file can fail in any way
            skipped[str(path.relative_to(folder))] = _why(error)
    sections += _harness(folder, overview, skipped)
    sections += _training(folder, skipped)
    if overview.figures:
        sections.insert(0, _overview(folder, overview, skipped))
    left_out = "; ".join(f"{name} ({why})" for name, why in skipped.items())
    if not sections:
        families = laboratories.SHOWN_BY
        names = (*SHOWN_BY, *families, *(f"{family}_NAME" for family in families))
        wanted = ", ".join(f"{kind}.json" for kind in names)
        unreadable = f" that can be read: {left_out}" if skipped else ": measure something first"
        raise ValueError(f"{folder} holds no {wanted} or log.jsonl{unreadable}.")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    shown = {"title": title, "date": date.today().isoformat(), "sections": sections, "skipped": skipped}
    with atomic_file(page, MAKE_ROOM) as file:
        file.write_text(environment.get_template("report.html.j2").render(shown), encoding="utf-8")
    if skipped:
        raise ValueError(f"{page} is written, without files that cannot be read: {left_out}. Delete or replace them.")
    return page


def _files(folder: Path, name: str, skipped: dict[str, str]) -> list[Path]:
    """Finds files in a folder and its subfolders; skips links, which may lead out of the folder."""
    found = sorted(folder.rglob(name))
    linked = [path for path in found if _is_linked(path, folder)]
    skipped |= {str(path.relative_to(folder)): "a link" for path in linked}
    return [path for path in found if path not in linked]


def _is_linked(path: Path, folder: Path) -> bool:
    """Whether a file, or a folder between it and `folder`, is a link."""
    between = [parent for parent in path.parents if folder in parent.parents]
    return any(part.is_symlink() for part in (path, *between))


def _why(error: Exception) -> str:
    """Formats an exception in one line."""
    said = " ".join(str(error).split())
    return said if type(error) is ValueError else f"{type(error).__name__}: {said}"


def _describe_result(path: Path, folder: Path, overview: Overview, skipped: dict[str, str]) -> Section:
    """Returns the section of a result of this package, or of a custom evaluation."""
    kind, shown_by = path.stem, _shown_by(path.stem)
    if linked := [file for file in (path, path.with_suffix(".csv")) if file.is_symlink() and shown_by is None]:
        raise ValueError(f"{linked[0].name} is a link")
    results = json.loads(read_text(path))
    is_result = isinstance(results, dict) and {"kind", *METADATA} <= results.keys()
    if not is_result or (shown_by is not None and results["kind"] != kind):
        raise ValueError("not a result of a condense command")
    if not isinstance(results["versions"], dict):
        raise ValueError("versions are not an object")
    if shown_by is None:  # a custom evaluation: the runner has stored its figures
        tables, figures = own_tables(path), [Figure(**one) for one in results.get("overview", [])]
    else:
        tables = shown_by.tables(results)
        figures = shown_by.overview(results) if hasattr(shown_by, "overview") else []
    pictures = [_embed(found) for found in _pictures(path, folder, skipped)]
    about = results.get("about") or getattr(shown_by, "about", None) or ABOUT.get(kind, "An evaluation of your own.")
    models = results.get("models") if figures or shown_by is None else ()
    overview.add(str(path.relative_to(folder)), figures, models or ())
    return Section(_title(kind, path, folder), about, tables, pictures, results)


def _shown_by(kind: str) -> Any:
    """Returns the class or module with the tables of a kind of results; None for a custom evaluation."""
    family = kind.partition("_")[0]
    if family in laboratories.SHOWN_BY:
        return resolve_name(laboratories.SHOWN_BY[family])(kind)
    return resolve_name(SHOWN_BY[kind]) if kind in SHOWN_BY else None


def _harness(folder: Path, overview: Overview, skipped: dict[str, str]) -> list[Section]:
    """Returns the section of the results of lm-evaluation-harness, if there are any."""
    tables = []
    for path in _files(folder, "results_*.json", skipped):  # the newest of a folder comes last
        result = str(path.relative_to(folder))
        try:
            run = read_harness(path)
            name = overview.names.get(run.source, Path(run.source).name)
            tables.append(run.table(name))
            overview.add(result, run.figures(name))
            if missing := run.not_finite():
                overview.left_out[f"{result}: {'; '.join(missing)}"] = "not a finite number"
            if run.grouped:
                overview.left_out[f"{result}: {', '.join(sorted(run.grouped))}"] = "are shown only in the section"
        except Exception as error:
            skipped[result] = _why(error)
    return [Section("lm-evaluation-harness", ABOUT["harness"], tables, [], {})] if tables else []


def _overview(folder: Path, overview: Overview, skipped: dict[str, str]) -> Section:
    """Returns the first section, and writes its figures to overview.json and overview.csv."""
    overview.left_out |= skipped
    results = {"kind": "overview", "figures": overview.records(), "left_out": overview.left_out}
    write_results(folder / "overview", results, overview.records())
    return Section("overview", ABOUT["overview"], overview.tables(), [], {})


def _pictures(path: Path, folder: Path, skipped: dict[str, str]) -> list[Path]:
    """Returns a result's pictures: files that begin with its name, unless a longer result name fits as well."""
    names = [other.stem for other in path.parent.glob("*.json")]
    found = []
    for picture in sorted(path.parent.glob(f"{path.stem}*.png")):
        if picture.is_symlink():
            skipped[str(picture.relative_to(folder))] = "a link"
        elif path.stem == max((name for name in names if picture.stem.startswith(name)), key=len):
            if picture.read_bytes().startswith(PNG):
                found.append(picture)
            else:
                skipped[str(picture.relative_to(folder))] = "not a PNG"
    return found


def _training(folder: Path, skipped: dict[str, str]) -> list[Section]:
    runs = []
    for path in _files(folder, "log.jsonl", skipped):
        try:
            if run := read_run(path, folder):
                runs.append(run)
        except Exception as error:
            skipped[str(path.relative_to(folder))] = _why(error)
    if not runs:
        return []
    pictures = [_embed(path) for path in write_training(runs, folder / "training")]
    return [Section("training", ABOUT["training"], [runs_table(runs)], pictures, {})]


def _title(kind: str, path: Path, folder: Path) -> str:
    where = path.parent.relative_to(folder)
    return kind if str(where) in (".", kind) else f"{kind}: {where}"


def _embed(path: Path) -> Picture:
    data = path.read_bytes()
    (pixels,) = struct.unpack(">I", data[len(PNG) + 8 :][:4])  # after the length and the name of the first chunk
    return Picture(base64.b64encode(data).decode(), round(CSS_PIXELS * pixels))
