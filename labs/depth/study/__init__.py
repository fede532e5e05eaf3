"""The experiments on continuous depth: the paper's own, controls that could refute them, and extensions."""
