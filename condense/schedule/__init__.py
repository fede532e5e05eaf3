"""The order in which (layer, segment) cells are run."""

from .sequential import run_sequential
from .wavefront import run_wavefront

RUNS = {"auto": run_sequential, "sequential": run_sequential, "wavefront": run_wavefront}

__all__ = ["RUNS"]
