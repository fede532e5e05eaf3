"""Objectives that ablate the five properties which causal language models and diffusion models share."""
