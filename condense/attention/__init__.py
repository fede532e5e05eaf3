"""Attention over [memory ; current segment]: the mask, the choice of an implementation, and the implementations."""

from .dispatch import IMPLEMENTATIONS, attend, choose_attention
from .mask import Visibility

__all__ = ["IMPLEMENTATIONS", "Visibility", "attend", "choose_attention"]
