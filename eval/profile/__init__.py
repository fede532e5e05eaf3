"""Memory and time against length: folded, stock and sliding-window models of one shape (table I, figures 5 to 7)."""

from .run import profile
from .show import draw, tables

__all__ = ["draw", "profile", "tables"]
