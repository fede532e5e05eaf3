"""The cost of a run, without running it: memory, operations and hours."""
