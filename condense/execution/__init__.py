"""The order in which (layer, segment) cells are run."""

from .selection import choose_schedule, schedule_for
from .sequential import run_sequential
from .wavefront import run_wavefront

RUNS = {"sequential": run_sequential, "wavefront": run_wavefront}

__all__ = ["RUNS", "choose_schedule", "schedule_for"]
