"""Checkpoints: complete or absent, safe to load, and resumed under the recipe that wrote them."""
