"""Compares twins that differ in one ingredient, to see which one decides how a small transformer reads durations."""
