import pytest


@pytest.fixture
def nothing_is_trained(monkeypatch):
    monkeypatch.setattr("condense.eval.study.study.train_alone", pytest.fail)
