"""Shared parts of studies, which train models alike to answer a question, and measure them."""
