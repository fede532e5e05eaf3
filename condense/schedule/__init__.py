"""The order in which (layer, segment) cells are run."""

from .sequential import run_sequential

__all__ = ["run_sequential"]
