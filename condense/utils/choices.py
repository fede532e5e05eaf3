"""A value that a user chooses by its name."""

from collections.abc import Collection


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises `ValueError` for a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known: choose one of {', '.join(choices)}.")
