"""What several tests of evaluations need."""

import pytest

from condense.training.small_llama import save_small_llama


@pytest.fixture
def without_pictures(monkeypatch):
    """Pictures are drawn, not laid out and not written: that takes longer than a small measurement."""
    monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a small Llama with random weights."""
    folder = tmp_path_factory.mktemp("llama")
    save_small_llama(folder)
    return folder
