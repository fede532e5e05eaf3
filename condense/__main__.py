"""`python -m condense` is the command `condense`."""

from .cli.main import main

main()
