"""Triton's interpreter runs the kernels on the CPU."""

import sys

import pytest

KERNELS = "condense.kernels.triton_"


@pytest.fixture(scope="package", autouse=True)
def interpreter():
    """Triton reads TRITON_INTERPRET while it is imported, and torch has imported it: the tests get an import of their
    own, without its extension modules, which can be loaded once only."""
    pytest.importorskip("triton")
    kept = _loaded()
    for name in kept:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(kept)


def _loaded() -> dict:
    return {name: module for name, module in sys.modules.items() if _is_python_of_triton(name)}


def _is_python_of_triton(name: str) -> bool:
    of_triton = name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C"))
    return of_triton or name.startswith(KERNELS)
