"""`condense study ablations`: the ablations of the five properties, and the experiments on designs that follow.

A name leads to its class without importing it, since that loads torch.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from .grid import PROPERTIES
from .options import AblationOptions

if TYPE_CHECKING:
    from ..runner import Results, Task

ABLATION = "condense.eval.autoregressivity.ablation:Ablation"
# Each is a task with the arguments (options, output), whose kind is `ablation_NAME`.
DESIGNS: dict[str, str] = {
    "blocks": "condense.eval.autoregressivity.blocks:Blocks",
    "classification": "condense.eval.autoregressivity.classification:Classification",
    "sampling": "condense.eval.autoregressivity.sampling:Sampling",
    "synthetic_states": "condense.eval.autoregressivity.synthetic_states:SyntheticStates",
    "speech_rate": "condense.eval.autoregressivity.speech_rate:SpeechRates",
}
EXPERIMENTS = (*PROPERTIES, *DESIGNS)


def shown_by(kind: str) -> Any:
    """The class that has the tables of a result, by the name of its file."""
    if kind == "ablation":
        return resolve_name("condense.eval.autoregressivity.ablation:Summary")
    return resolve_name(DESIGNS.get(kind.removeprefix("ablation_"), ABLATION))


def make_task(name: str, options: AblationOptions, output: Path) -> "Task":
    """The ablation of a property, or the experiment on a design."""
    if name in DESIGNS:
        return resolve_name(DESIGNS[name])(options, output)
    return resolve_name(ABLATION)(name, options, output)


def ablate(name: str, output: Path, options: AblationOptions) -> "Results | None":
    """Runs one experiment; returns what its JSON holds, or None in a process that is not the first of several.

    Raises `ValueError` for texts and reference models that can't be used, before anything is trained.
    """
    from ..runner import run_on_ranks

    return run_on_ranks(partial(make_task, name), f"ablation_{name}", options, output)


def ablate_all(output: Path, options: AblationOptions) -> "dict[str, Results]":
    """Every experiment in turn, and the summary of the properties as soon as all five are measured; results by the name
    of their files.

    Nothing in a process that is not the first of several.
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
    """Writes the files of `ablation`, which compares the properties, and returns what the JSON holds."""
    from ..results import write_results
    from .ablation import Summary
    from .pictures import draw_summary

    summary = Summary.of(properties)
    write_results(output / "ablation", summary, summary["rows"])
    draw_summary(summary, output / "ablation")
    return summary
