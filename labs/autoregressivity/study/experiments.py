"""The experiments of `condense study ablations`: ablations of the five properties, and designs that follow from them.

Their classes are named and imported when they are used, because that loads torch.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from .grid import PROPERTIES
from .options import AblationOptions

if TYPE_CHECKING:
    from condense.eval.runner import Results, Task

ABLATION = "condense.labs.autoregressivity.study.ablation:Ablation"
# Each class is a task with the arguments (options, output) and the kind `ablation_NAME`.
DESIGNS: dict[str, str] = {
    "blocks": "condense.labs.autoregressivity.study.blocks:Blocks",
    "classification": "condense.labs.autoregressivity.study.classification:Classification",
    "sampling": "condense.labs.autoregressivity.study.sampling:Sampling",
    "synthetic_states": "condense.labs.autoregressivity.study.synthetic_states:SyntheticStates",
    "speech_rate": "condense.labs.autoregressivity.study.speech_rate:SpeechRates",
}
EXPERIMENTS = (*PROPERTIES, *DESIGNS)


def shown_by(kind: str) -> Any:
    """Returns the class or module that has the tables for a kind of results."""
    if kind == "ablation":
        return resolve_name("condense.labs.autoregressivity.study.summary")
    return resolve_name(DESIGNS.get(kind.removeprefix("ablation_"), ABLATION))


def make_task(name: str, options: AblationOptions, output: Path) -> "Task":
    """Returns the ablation of a property, or the experiment on a design."""
    arguments = (options, output) if name in DESIGNS else (name, options, output)
    return resolve_name(DESIGNS.get(name, ABLATION))(*arguments)


def ablate(name: str, output: Path, options: AblationOptions) -> "Results | None":
    """Runs one experiment; returns the contents of its JSON file, or None in all processes except the first.

    Raises `ValueError` for texts and reference models that can't be used, before anything is trained.
    """
    from condense.eval.runner import run_on_ranks

    return run_on_ranks(partial(make_task, name), f"ablation_{name}", options, output)


def ablate_all(output: Path, options: AblationOptions) -> "dict[str, Results]":
    """Runs every experiment, and writes the summary once all five properties are measured.

    Returns the results by the names of their files; nothing in all processes except the first.
    """
    properties = _ablate_each(PROPERTIES, output, options)
    summary = _write_summary(properties, output) if len(properties) == len(PROPERTIES) else None
    designs = _ablate_each(DESIGNS, output, options)
    if summary is None:
        return {}
    return {f"ablation_{name}": results for name, results in (properties | designs).items()} | {"ablation": summary}


def _ablate_each(names: Iterable[str], output: Path, options: AblationOptions) -> "dict[str, Results]":
    found = {name: ablate(name, output, options) for name in names}
    return {name: results for name, results in found.items() if results is not None}


def _write_summary(properties: "dict[str, Results]", output: Path) -> "Results":
    """Writes the files of `ablation`, which compares the properties, and returns the contents of the JSON file."""
    from condense.eval.results import write_results

    from .pictures import draw_summary
    from .summary import summarize

    summary = summarize(properties)
    write_results(output / "ablation", summary, summary["rows"])
    draw_summary(summary, output / "ablation")
    return summary
