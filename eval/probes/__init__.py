"""The continuity experiments: what a model makes of fractions of a word, and of what lies between two words."""

from .experiments import EXPERIMENTS
from .run import probe, probe_all
from .show import tables

__all__ = ["EXPERIMENTS", "probe", "probe_all", "tables"]
