"""Continuous depth: a learned flow with a control in place of a model's middle layers."""
