"""Means over seeds and their intervals, as text and in pictures."""

import pytest
from matplotlib.figure import Figure

from condense.eval.intervals import LINEAR, LOGIT, band, interval

pytestmark = pytest.mark.unit


def test_a_band_has_the_interval_of_its_scale():
    """Numbers of evaluations, which are not shares, have one too."""
    for curves, scale, bands in (
        ([[14.0, 20.0], [20.0, 26.0]], LINEAR, 1),
        ([[0.2, 0.4], [0.3, 0.6]], LOGIT, 1),
        ([[0.2, 0.4]], LOGIT, 0),
    ):
        panel = Figure().subplots()
        band(panel, [-1.0, 1.0], curves, "name", "C0", scale)
        assert len(panel.collections) == bands
        for drawn in panel.collections:
            path = drawn.get_paths()[0].vertices
            _, low, high = interval([curve[1] for curve in curves], scale)
            assert {low, high} <= set(path[path[:, 0] == 1.0][:, 1])
