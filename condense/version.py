"""The version of the package, which `condense --version` prints without loading it."""

__version__ = "0.2.0"
