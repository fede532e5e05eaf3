"""The cases of a grid."""

import pytest

from condense.eval.benchmark.grid import DEFAULTS, TABLE_1, axes, grid
from condense.eval.benchmark.options import ProfileOptions

pytestmark = pytest.mark.unit


def test_the_grid_measures_nothing_twice():
    points = list(grid(("folded", "stock"), ("training", "prefill"), (1, 2), (1,), (8, 16), ("sdpa",), (False, True)))
    assert len(set(points)) == len(points) == 2 * 2 * 3 + 2 * 3  # training with and without checkpoints; prefill
    assert [point.kind for point in points[:3]] == ["folded", "stock", "folded"]


def test_axes_are_the_options_or_the_defaults():
    assert axes(ProfileOptions(preset="table1"), TABLE_1) == TABLE_1
    assert axes(ProfileOptions(preset="table1", lengths=[64]), DEFAULTS) == DEFAULTS | {"lengths": [64]}
