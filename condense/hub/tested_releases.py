"""The releases of transformers that this version is tested with."""

import warnings

from packaging.version import Version

OLDEST, NEWEST = "5.22", "5.24"  # CI's jobs run both; the newest releases beyond run every night


def warn_if_untested(installed: str) -> None:
    """Warns of a release of transformers that is older or newer than the tested ones."""
    release = Version(installed).release[:2]
    if release < Version(OLDEST).release:
        warnings.warn(
            f"transformers {installed} is older than {OLDEST}, the oldest that condense supports: generate with a "
            "cache and prefill_chunk_size reads text twice there. Install a newer one.",
            stacklevel=3,
        )
    elif release > Version(NEWEST).release:
        warnings.warn(
            f"transformers {installed} is newer than {NEWEST}, the newest that this version of condense was tested "
            f"with. If something fails, install transformers {NEWEST} or a newer condense.",
            stacklevel=3,
        )
