"""Measures the worth of the memory: models that differ only in their memory, trained alike from scratch."""
