"""The continuity experiments: what a model makes of fractions of a word, and of what lies between two words."""

from .run import EXPERIMENTS, probe, probe_all
from .show import tables

__all__ = ["EXPERIMENTS", "probe", "probe_all", "tables"]
