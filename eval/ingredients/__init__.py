"""Which ingredient of a small transformer makes it read durations as it does: twins that differ in one thing."""
