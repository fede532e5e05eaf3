"""Continuous inputs: sentences as functions of time."""
