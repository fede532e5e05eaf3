"""Models for the study of structured autoregressivity.

Importing it registers them with transformers' Auto classes.
"""

from condense.hub.registration import register
from condense.labs import depth as depth  # the base of a wrapper may have a depth block

from .model.block_diffusion import (
    BlockDiffusionConfig,
    BlockDiffusionForCausalLM,
    Corruption,
    likelihood_bound,
    to_block_diffusion,
)
from .model.late_cache import LateCache
from .model.multi_token import MultiTokenConfig, MultiTokenForCausalLM
from .model.position_experts import PositionExpertsConfig, PositionExpertsForCausalLM
from .model.wrapper import WrapperConfig, WrapperForCausalLM

register(BlockDiffusionConfig, BlockDiffusionForCausalLM)
register(MultiTokenConfig, MultiTokenForCausalLM)
register(PositionExpertsConfig, PositionExpertsForCausalLM)

__all__ = [
    "BlockDiffusionConfig",
    "BlockDiffusionForCausalLM",
    "Corruption",
    "LateCache",
    "MultiTokenConfig",
    "MultiTokenForCausalLM",
    "PositionExpertsConfig",
    "PositionExpertsForCausalLM",
    "WrapperConfig",
    "WrapperForCausalLM",
    "likelihood_bound",
    "to_block_diffusion",
]
