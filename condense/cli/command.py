"""The class of every command: loads the package when a command begins, not to parse or explain its options."""

import gc
import sys
from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        load_package()
        return super().invoke(ctx)


class App(typer.Typer):
    """A `Typer` whose commands have the class `Command`."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=Command, **options)


def load_package() -> None:
    """Runs `condense/__init__.py`, which registers the models, if the script created the package without running it."""
    package = sys.modules["condense"]
    if not hasattr(package, "CondenseForCausalLM"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
        gc.freeze()  # imports are not garbage: each collection, and the one at exit, would take half a second
