"""One HTML page with the tables and plots of all results in a folder.

It finds the results of the other commands (`passkey.json`, `profile.json`, `probe_NAME.json`, `depth_NAME.json`,
`ablation_NAME.json`, ...) and the logs of training runs, in the folder and below it, and writes FOLDER/report.html,
which needs no other file.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from condense.files import check_not_linked, read_text

from .autoregressivity.experiments import shown_by as shown_by_ablation
from .depth.experiments import find_experiment
from .results import Table, picture
from .tasks import TASKS

SHOWN_BY = TASKS | {
    "healing": "condense.eval.healing.study:Healing",
    "memory": "condense.eval.memory.study:Memory",
    "ingredients": "condense.eval.ingredients.study:Ingredients",
    "profile": "condense.eval.benchmark.profile_tables",
    "modules": "condense.eval.benchmark.module_tables",
    "schedules": "condense.eval.benchmark.schedule_tables",
}  # these have `tables`
PROBES = "condense.eval.continuity.probes:PROBES"
METADATA = ("command", "hardware", "versions", "date")
ABOUT = {
    "passkey": "A number is hidden in irrelevant text and asked for at the end. An answer counts when the model's own "
    "greedy decoding gives all digits. Prompts are fresh; lengths are in tokens, answer included.",
    "facts": "Facts stand in their order in other text, and a question at the end asks for one word. An answer counts "
    "when the model's own greedy decoding gives exactly its tokens. Lengths are in tokens, answer included. The last "
    "such word is the last place, person or thing of the facts, whichever the question asks for, that it does not "
    "name. Facts are tracked where the answer is right and neither that word nor a guess among the others says why.",
    "recall": "Keys with values are said in sentences between irrelevant ones, and one key is asked about at the end. "
    "An answer counts when the model's own greedy decoding gives the value, or all of its values in their order. The "
    "capacity is the number of pairs up to which the right answers are at least 90 %, on a line between the numbers "
    "measured; the size of the memory is that of a folded model.",
    "summarization": "Summaries that the models write, against the references.",
    "perplexity": "The gain of the memory, and how far back it reaches: the same tokens, predicted with more and more "
    "text before.",
    "suite": "Benchmarks of long text, as lm-evaluation-harness has them. Where a benchmark makes its texts, it makes "
    "them at each length; else a length holds the texts of more than half of it.",
    "attention": "Scores before softmax over memory and current segment, and how much attention goes to memory.",
    "healing": "A stock checkpoint is folded and trained to use its memory. What folding costs is the "
    "held-out loss before any training, less that of the stock model with full attention.",
    "memory": "Models that differ in their memory alone, trained alike from the same random weights: the loss of the "
    "same held-out segments by the segments before them.",
    "ingredients": "Models that differ from a twin in one thing, trained alike to count words and to add numbers as "
    "whole tokens; then words and numbers shrink. Peaks are those of the probe of counting, at most the mean number of "
    "repetitions over the counterfactual; P1, P2 and P3 those of the probe of sums, by the rule of the paper's text, "
    "among the sums whose first digit is right. Intervals are t intervals over seeds.",
    "profile": "Models of one shape with random weights. Every point was measured in a process of its own.",
    "modules": "Memory of one training step, as torch's MemTracker counts tensors. Folded models run segment by "
    "segment.",
    "schedules": "One folded model in both orders of computation, which give the same results, in turn and repeat by "
    "repeat within one process per point; auto is the rule by which a model chooses between them itself.",
    "training": "Logged while training.",
}


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    tables: list[Table]
    pictures: list[str]  # PNG as base64
    origin: dict[str, Any]  # command, hardware, versions and date, where known


def write_report(folder: Path, title: str = "condense") -> Path:
    """Writes the page and returns its path.

    Raises `ValueError` for a folder that holds no results, and where a file that it writes is a link; and after the
    page is written, for files that are damaged, links or of another program, which the page names and leaves out.
    """
    import jinja2

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: pass one that holds results.")
    path = folder / "report.html"
    check_not_linked(path, folder / "training.png", folder / "training.svg")
    skipped: dict[str, str] = {}
    sections = []
    for found in (
        found
        for kind in (*SHOWN_BY, "probe_*", "depth_*", "ablation", "ablation_*")
        for found in _files(folder, f"{kind}.json", skipped)
    ):
        try:
            sections.append(_measured(found, folder, skipped))
        except Exception as error:  # a file of another program can be wrong in any way
            skipped[str(found.relative_to(folder))] = _why(error)
    sections += _training(folder, skipped)
    left_out = "; ".join(f"{name} ({why})" for name, why in skipped.items())
    if not sections:
        wanted = ", ".join(f"{kind}.json" for kind in (*SHOWN_BY, "probe_NAME", "depth_NAME", "ablation_NAME"))
        unreadable = f" that can be read: {left_out}" if skipped else ": measure something first"
        raise ValueError(f"{folder} holds no {wanted} or log.jsonl{unreadable}.")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.j2").render(
        title=title, date=date.today().isoformat(), sections=sections, skipped=skipped
    )
    path.write_text(page, encoding="utf-8")
    if skipped:
        raise ValueError(f"{path} is written, without files that cannot be read: {left_out}. Delete or replace them.")
    return path


def _files(folder: Path, name: str, skipped: dict[str, str]) -> list[Path]:
    """The files of a name in a folder and below it; links, which may lead out of the folder, are skipped."""
    found = sorted(folder.rglob(name))
    linked = [path for path in found if _is_linked(path, folder)]
    skipped |= {str(path.relative_to(folder)): "a link" for path in linked}
    return [path for path in found if path not in linked]


def _is_linked(path: Path, folder: Path) -> bool:
    """Whether a file, or a folder between it and `folder`, is a link."""
    between = [parent for parent in path.parents if folder in parent.parents]
    return any(part.is_symlink() for part in (path, *between))


def _why(error: Exception) -> str:
    """The exception in one line."""
    said = " ".join(str(error).split())
    return said if type(error) is ValueError else f"{type(error).__name__}: {said}"


def _measured(path: Path, folder: Path, skipped: dict[str, str]) -> Section:
    """The section of a result of this package."""
    kind = path.stem
    results = json.loads(read_text(path))
    if not isinstance(results, dict) or not {"kind", *METADATA} <= results.keys() or results["kind"] != kind:
        raise ValueError("no result of a condense command")
    if not isinstance(results["versions"], dict):
        raise ValueError("versions are no object")
    family, _, name = kind.partition("_")
    if family == "probe":
        shown_by = resolve_name(PROBES)[name]
    elif family == "depth":
        shown_by = find_experiment(name)
    elif family == "ablation":
        shown_by = shown_by_ablation(kind)
    else:
        shown_by = resolve_name(SHOWN_BY[kind])
    pictures = [_embed(found) for found in _pictures(path, folder, skipped)]
    return Section(
        _title(kind, path, folder), results.get("about") or ABOUT[kind], shown_by.tables(results), pictures, results
    )


def _pictures(path: Path, folder: Path, skipped: dict[str, str]) -> list[Path]:
    """The pictures of a result: those whose names begin with its name, and with no longer name of another result."""
    names = [other.stem for other in path.parent.glob("*.json")]
    linked = [found for found in path.parent.glob(f"{path.stem}*.png") if found.is_symlink()]
    skipped |= {str(found.relative_to(folder)): "a link" for found in linked}
    return [
        found
        for found in sorted(path.parent.glob(f"{path.stem}*.png"))
        if found not in linked and path.stem == max((name for name in names if found.stem.startswith(name)), key=len)
    ]


def _training(folder: Path, skipped: dict[str, str]) -> list[Section]:
    runs = []
    for path in _files(folder, "log.jsonl", skipped):
        try:
            if run := _read_run(path, folder):
                runs.append(run)
        except Exception as error:
            skipped[str(path.relative_to(folder))] = _why(error)
    if not runs:
        return []
    _draw_curves(runs, folder / "training")
    titles = {
        "name": "run",
        "steps": "steps",
        "segments": "longest text [segments]",
        "loss": "loss, mean of the last ten lines",
        "validation": "last validation loss",
        "reference": "the paper's validation loss",
        "accuracy": "right answers in validation",
    }
    shown = [name for name in titles if any(run[name] != "" for run in runs)]
    columns, rows = [titles[name] for name in shown], [[run[name] for name in shown] for run in runs]
    curves = _embed(folder / "training.png")
    return [Section("training", ABOUT["training"], [Table("runs", columns, rows)], [curves], {})]


def _read_run(path: Path, folder: Path) -> dict[str, Any] | None:
    """The fields of a run for the table and the curves; None where nothing was logged yet."""
    lines = [json.loads(line) for line in read_text(path).splitlines(keepends=True) if line.endswith("\n")]
    losses = [line for line in lines if "loss" in line]
    if not losses:
        return None
    for line in losses:
        needed = ("step", "loss", "segments" if "segments" in line else "learning_rate")
        if wrong := [name for name in needed if not isinstance(line.get(name), int | float)]:
            raise ValueError(f"a line has no number {wrong[0]}")
    validation: dict[str, float] = next((line for line in reversed(lines) if "eval_loss" in line), {})
    return {
        "name": str(path.parent.relative_to(folder)),
        "lines": losses,
        "steps": f"{losses[-1]['step']:,}",
        "loss": f"{sum(line['loss'] for line in losses[-10:]) / len(losses[-10:]):.4f}",
        "segments": losses[-1].get("segments", ""),
        "validation": f"{validation['eval_loss']:.4f}" if validation else "",
        "reference": _reference_loss(path.with_name("recipe.json")),
        "accuracy": next((f"{share:.1%}" for name, share in validation.items() if name.endswith("_accuracy")), ""),
    }


def _reference_loss(recipe: Path) -> str:
    """The validation loss that a run's recipe names to compare with; empty where it names none."""
    if recipe.is_symlink():
        raise ValueError(f"{recipe.name} beside it is a link")
    if not recipe.exists():
        return ""
    reference = (json.loads(read_text(recipe)).get("evaluation") or {}).get("reference_loss")
    return "" if reference is None else f"{reference:g}"


def _draw_curves(runs: Sequence[dict[str, Any]], path: Path) -> None:
    with picture(path, columns=2, figsize=(10, 3.2)) as (left, right):
        for run in runs:
            steps = [line["step"] for line in run["lines"]]
            left.plot(steps, [line["loss"] for line in run["lines"]], label=run["name"], linewidth=1)
            if all("segments" in line for line in run["lines"]):
                right.step(steps, [line["segments"] for line in run["lines"]], label=run["name"], where="post")
            else:
                right.plot(steps, [line["learning_rate"] for line in run["lines"]], label=run["name"])
        left.set_yscale("log")
        left.set_title("training loss", fontsize=10)
        grows = any("segments" in run["lines"][0] for run in runs)
        right.set_title("length of the text [segments]" if grows else "learning rate", fontsize=10)
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)


def _title(kind: str, path: Path, folder: Path) -> str:
    where = path.parent.relative_to(folder)
    return kind if str(where) in (".", kind) else f"{kind}: {where}"


def _embed(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
