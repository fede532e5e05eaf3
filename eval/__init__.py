"""Evaluation and profiling of folded and of stock models."""
