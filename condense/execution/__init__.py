"""The order in which the (layer, segment) cells of a call run."""

from .executor import Executor
from .selection import choose_schedule, schedule_for
from .sequential import SequentialExecutor
from .wavefront import WavefrontExecutor

EXECUTORS = {"sequential": SequentialExecutor, "wavefront": WavefrontExecutor}

__all__ = ["EXECUTORS", "Executor", "SequentialExecutor", "WavefrontExecutor", "choose_schedule", "schedule_for"]
