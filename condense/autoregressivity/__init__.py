"""Models for the study of structured autoregressivity.

Importing it registers them with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .. import depth as depth  # the base of a wrapper may have a depth block
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

AutoConfig.register(BlockDiffusionConfig.model_type, BlockDiffusionConfig)
AutoModelForCausalLM.register(BlockDiffusionConfig, BlockDiffusionForCausalLM)
AutoConfig.register(MultiTokenConfig.model_type, MultiTokenConfig)
AutoModelForCausalLM.register(MultiTokenConfig, MultiTokenForCausalLM)
AutoConfig.register(PositionExpertsConfig.model_type, PositionExpertsConfig)
AutoModelForCausalLM.register(PositionExpertsConfig, PositionExpertsForCausalLM)

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
