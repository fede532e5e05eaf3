"""Training with durations."""
