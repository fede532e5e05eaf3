"""Models for the study of structured autoregressivity.

Importing it registers them with transformers' Auto classes.
"""

import condense.labs.depth.model  # noqa: F401  the base of a wrapper may have a depth block
from condense.hub.registration import register

from .block_diffusion import (
    BlockDiffusionConfig,
    BlockDiffusionForCausalLM,
    Corruption,
    likelihood_bound,
    to_block_diffusion,
)
from .late_cache import LateCache
from .multi_token import MultiTokenConfig, MultiTokenForCausalLM
from .position_experts import PositionExpertsConfig, PositionExpertsForCausalLM
from .wrapper import WrapperConfig, WrapperForCausalLM

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
