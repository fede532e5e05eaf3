"""`condense study depth`: the experiments on continuous depth."""

from functools import partial

from condense.eval.command import command, name_argument, run_experiments

from .experiments import EXPERIMENTS
from .options import DepthOptions

depth = command(
    DepthOptions,
    partial(run_experiments, "condense.labs.depth.study.experiments:depth", "condense study depth"),
    "study depth",
    name_argument(f"{', '.join(EXPERIMENTS)}, or all of them."),
    extras=["depth"],
)
