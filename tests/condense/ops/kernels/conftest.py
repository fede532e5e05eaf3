"""Triton's interpreter runs the kernels on the CPU."""

import sys

import pytest
import torch

import condense.ops.kernels

KERNELS = "condense.ops.kernels.triton_"


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that a kernel gets for its results is not zero by chance, but not a number."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def fill(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: fill(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))


@pytest.fixture(scope="package", autouse=True)
def interpreter():
    """Triton reads TRITON_INTERPRET while it is imported, and torch has imported it: the tests get an import of their
    own, without its extension modules, which can be loaded once only."""
    pytest.importorskip("triton")
    kept = _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
    _forget()
    sys.modules.update(kept)


def _forget() -> dict:
    """Removes the modules, also as attributes of our package: a patch by name would find them there."""
    loaded = _loaded()
    for name in loaded:
        del sys.modules[name]
        if name.startswith(KERNELS):
            vars(condense.ops.kernels).pop(name.rpartition(".")[2], None)
    return loaded


def _loaded() -> dict:
    return {name: module for name, module in sys.modules.items() if _is_python_of_triton(name)}


def _is_python_of_triton(name: str) -> bool:
    of_triton = name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C"))
    return of_triton or name.startswith(KERNELS)
