import pytest

from condense.eval import results


@pytest.fixture
def nothing_is_trained(monkeypatch):
    monkeypatch.setattr("condense.eval.study.study.train_alone", pytest.fail)


@pytest.fixture(scope="module", autouse=True)
def coarse_pictures(request):
    """Pictures are coarse and not laid out, which takes less than half of the time, except in modules that look at
    them."""
    with pytest.MonkeyPatch.context() as patch:
        if not vars(request.module).keys() & {"is_drawn", "Image"}:
            patch.setattr(results, "DPI", 100)
            patch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda *_: None)
        yield
