"""`python -m condense` is the command `condense`."""

from .cli import main

main()
