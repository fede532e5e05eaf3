"""Objectives that ablate the five properties which causal language models and diffusion models share."""

from .. import recipe as recipe  # first: its schema imports the modules of this package, to register their kinds
