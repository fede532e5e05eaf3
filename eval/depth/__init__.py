"""The experiments on continuous depth: those of the paper, the controls that could refute them, and what follows."""
