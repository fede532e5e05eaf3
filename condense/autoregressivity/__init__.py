"""Models for the study of structured autoregressivity.

Importing it registers them with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .block_diffusion import (
    BlockDiffusionConfig,
    BlockDiffusionForCausalLM,
    Corruption,
    likelihood_bound,
    to_block_diffusion,
)

AutoConfig.register(BlockDiffusionConfig.model_type, BlockDiffusionConfig)
AutoModelForCausalLM.register(BlockDiffusionConfig, BlockDiffusionForCausalLM)

__all__ = ["BlockDiffusionConfig", "BlockDiffusionForCausalLM", "Corruption", "likelihood_bound", "to_block_diffusion"]
