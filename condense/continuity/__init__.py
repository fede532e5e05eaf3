"""Continuous inputs: tokens with fractional durations."""

from .durations import Timeline, durations_from_time_steps

__all__ = ["Timeline", "durations_from_time_steps"]
