"""The continuity experiments: how models treat fractions of a token, and inputs between two tokens."""
