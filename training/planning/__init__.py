"""What a run will need: memory, operations and hours, without running it."""
