"""The optional packages of the commands, checked before any work is done."""

from collections.abc import Collection
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "condense-llama"
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"

requires = cache(metadata.requires)  # parses a long file


def how_to_install(extra: str = "") -> str:
    """Returns the commands that install the package, with the packages of an extra.

    They name files: the package is not on PyPI, where somebody else could take its name.
    """
    extras = f"[{extra}]" if extra else ""
    return f"in a checkout pip install -e '.{extras}', or from its wheel pip install '{WHEEL}{extras}'"


def check_installed(command: str, extra: str, without: Collection[str] = ()) -> None:
    """Raises `ValueError` for packages of an extra that are missing or have a version that it does not allow.

    Skips packages that this use of the command goes `without`. Checks nothing in a checkout that is not installed,
    because it has no list of packages.
    """
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return
    problems = [
        problem
        for requirement in needed
        if requirement.marker and requirement.marker.evaluate({"extra": extra}) and requirement.name not in without
        if (problem := _problem(requirement))
    ]
    if problems:
        raise ValueError(f"{command} needs {', '.join(problems)}: {how_to_install(extra)}.")


def _problem(requirement: "Requirement") -> str | None:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} (missing)"
    fits = requirement.specifier.contains(found, prereleases=True)
    return None if fits else f"{requirement.name}{requirement.specifier} (found {found})"
