"""The order in which the (layer, segment) cells of a call run."""

from .executor import Executor
from .segment_graph import GraphExecutor
from .selection import choose_schedule, schedule_for
from .sequential import SequentialExecutor
from .wavefront import WavefrontExecutor

EXECUTORS = {"sequential": SequentialExecutor, "wavefront": WavefrontExecutor, "graph": GraphExecutor}

__all__ = [
    "EXECUTORS",
    "Executor",
    "GraphExecutor",
    "SequentialExecutor",
    "WavefrontExecutor",
    "choose_schedule",
    "schedule_for",
]
