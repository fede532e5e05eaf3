"""Measures structured autoregressivity: what each of its five properties is worth."""
