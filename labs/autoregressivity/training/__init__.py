"""Objectives that ablate the five properties shared by causal language models and diffusion models."""

from condense.training import (
    recipe as recipe,  # first: its schema imports the modules of this package, to register their kinds
)
