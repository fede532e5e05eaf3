"""Structured autoregressivity: other orders and other objectives than one next token at a time."""
