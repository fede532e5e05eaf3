"""The metrics of the evaluations as metrics of the `evaluate` library: `evaluate.load(path("rouge"))`.

Each folder holds one, in the library's own layout. They are loaded from the package itself; nothing is fetched.
"""

from pathlib import Path

NAMES = ("rouge", "passkey")


def path(name: str) -> str:
    """The folder that `evaluate.load` takes. Raises `ValueError` for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"there is no metric {name!r}: choose from {', '.join(NAMES)}.")
    return str(Path(__file__).with_name(name))
