"""Continuous depth: a learned flow with a control in place of a model's middle layers.

Importing it registers the stock hybrid with transformers' Auto classes.
"""

from condense.hub.registration import register

from .block import DepthBlock, DepthFlow
from .conversion import convert_to_depth, set_solver
from .fields import MLPField
from .initialization import fit_field, missed_share
from .llama import DepthLlamaConfig, DepthLlamaForCausalLM, DepthLlamaModel, to_depth_llama
from .settings import DepthSettings

register(DepthLlamaConfig, DepthLlamaForCausalLM, DepthLlamaModel)

__all__ = [
    "DepthBlock",
    "DepthFlow",
    "DepthLlamaConfig",
    "DepthLlamaForCausalLM",
    "DepthLlamaModel",
    "DepthSettings",
    "MLPField",
    "convert_to_depth",
    "fit_field",
    "missed_share",
    "set_solver",
    "to_depth_llama",
]
