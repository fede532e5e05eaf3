import pytest

from condense.execution import cuda_graph

from .recording import recordings


@pytest.fixture
def counts(monkeypatch):
    counts = {"warm_up": 0, "capture": 0, "replay": 0}
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", recordings(counts))
    return counts
