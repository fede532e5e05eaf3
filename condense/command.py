"""The class of every command: the package is loaded when a command begins, not to parse or explain its options."""

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
    """A `Typer` whose commands are of the class `Command`."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=Command, **options)


def load_package() -> None:
    """Runs `condense/__init__.py`, which registers the models, where the script has made the package alone."""
    package = sys.modules["condense"]
    if not hasattr(package, "CondenseForCausalLM"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
        gc.freeze()  # what was imported is no garbage: each search of it, and the one at the end, takes half a second
