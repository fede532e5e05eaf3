"""Continuous depth: a learned flow with a control in the place of a model's middle layers."""

from .block import DepthBlock, DepthFlow
from .conversion import convert_to_depth, set_solver
from .fields import MLPField, VectorField
from .settings import DepthSettings

__all__ = ["DepthBlock", "DepthFlow", "DepthSettings", "MLPField", "VectorField", "convert_to_depth", "set_solver"]
