"""`condense probe`: the continuity experiments."""

from functools import partial

from ..command import command, name_argument, run_experiments
from .options import ProbeOptions

NAMES = "counting, events, sums, space, boolean, translation, scaling, density, memory"
probe = command(
    ProbeOptions,
    partial(run_experiments, "condense.eval.continuity.probes:probe", "condense probe"),
    "probe",
    name_argument(f"{NAMES}, or all of them."),
)
