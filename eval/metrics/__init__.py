"""The evaluations' metrics, for the `evaluate` library: `evaluate.load(path("rouge"))`.

Each folder holds one in the library's layout. They load from the package itself; nothing is downloaded.
"""

from pathlib import Path

NAMES = ("rouge", "passkey")


def path(name: str) -> str:
    """Returns the folder for `evaluate.load`. Raises `ValueError` for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"there is no metric {name!r}: choose from {', '.join(NAMES)}.")
    return str(Path(__file__).with_name(name))
