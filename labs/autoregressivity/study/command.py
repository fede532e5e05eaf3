"""`condense study ablations`: ablations of structured autoregressivity, and designs that follow from them."""

from enum import StrEnum
from functools import partial

from condense.eval.command import command, name_argument, run_experiments

from .experiments import EXPERIMENTS
from .options import AblationOptions

NAMES = StrEnum("Property", {name: name for name in (*EXPERIMENTS, "all")})  # type: ignore[misc]
ablations = command(
    AblationOptions,
    partial(run_experiments, "condense.labs.autoregressivity.study.experiments:ablate", "condense study ablations"),
    "study ablations",
    name_argument("A property or a design, or all of them.", NAMES, metavar="NAME"),
    extras=["autoregressivity", "train"],
)
