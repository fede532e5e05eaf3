"""Continuous inputs: sentences as functions of time, for folded models and for any causal language model."""

from condense.durations import durations_from_time_steps

from .adapter import ContinuousLM
from .quadrature import quadrature_weights
from .sentence import Sentence, interpolate
from .spans import TextSpan, find_spans, span_between

__all__ = [
    "ContinuousLM",
    "Sentence",
    "TextSpan",
    "durations_from_time_steps",
    "find_spans",
    "interpolate",
    "quadrature_weights",
    "span_between",
]
