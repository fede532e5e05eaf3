"""The commands, in a process that has imported torch."""

from typer.testing import CliRunner

import condense.cli.main


def printed(*arguments: object) -> str:
    """Returns what a command prints; what it raises is not caught."""
    done = CliRunner().invoke(condense.cli.main.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout
