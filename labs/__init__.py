"""The laboratories: a transformer as something continuous, in depth, in time, in space and in how it is trained.

Each is a slice of its own: `model`, `training`, `study`. The core knows their names only (`condense.laboratories`).
"""
