import pytest

from .recording import recorded_graphs


@pytest.fixture
def counts(monkeypatch):
    return recorded_graphs(monkeypatch)
