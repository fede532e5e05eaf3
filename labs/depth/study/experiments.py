"""The experiments by name, and `condense study depth`. Classes are imported only on use, because that loads torch."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from .options import DepthOptions

if TYPE_CHECKING:
    from condense.eval.runner import Results

    from .experiment import Experiment

# Each is the module of a class with the same name, capitalized.
EXPERIMENTS = ("stability", "solvers", "adaptive", "efficiency", "fold", "swap", "steering", "effort")


def find_experiment(name: str) -> "type[Experiment]":
    """Returns the experiment with this name. Raises `ValueError` for an unknown name."""
    if name not in EXPERIMENTS:
        (nearest,) = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0)
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"experiment {name!r} is unknown: did you mean {nearest!r}? Choose one of {known}, or all.")
    return resolve_name(f"condense.labs.depth.study.{name}:{name.capitalize()}")


def shown_by(kind: str) -> "type[Experiment]":
    """Returns the experiment that prints a result, by the name of the result's file."""
    return find_experiment(kind.removeprefix("depth_"))


def depth(name: str, output: Path, options: DepthOptions) -> "Results":
    """Runs one experiment, writes its files into `output`, and returns the contents of its JSON.

    Raises `ValueError` for an unknown experiment, and for texts that can't be read.
    """
    return _run([name], output, options)[name]


def depth_all(output: Path, options: DepthOptions) -> "dict[str, Results]":
    """Runs every experiment in turn; returns results by name. Raises `ValueError` like `depth`, before any starts."""
    return _run(EXPERIMENTS, output, options)


def _run(names: Iterable[str], output: Path, options: DepthOptions) -> "dict[str, Results]":
    from condense.eval.heap import reuse_freed_memory
    from condense.eval.runner import run

    reuse_freed_memory()
    experiments = {name: find_experiment(name)(options, output) for name in names}
    for experiment in experiments.values():
        experiment.settings()  # loads its texts and models, and keeps them
    return {name: run(experiment, output) for name, experiment in experiments.items()}
