"""Figures of several models together."""

import pytest

from condense.labs.continuity.study.aggregation import with_global

pytestmark = pytest.mark.unit


def test_the_global_row_by_hand():
    """One model has three valid records and another one has one; a model without valid records has no figures."""
    one, other = {"records": 4, "valid": 3, "mass": 0.9, "P1": 0.2}, {"records": 4, "valid": 1, "mass": 0.5, "P1": 1.0}
    none = {"records": 4, "valid": 0, "mass": None, "P1": None}
    assert with_global({"a": one}, ["P1"]) == {"a": one}
    found = with_global({"a": one, "b": other, "c": none}, ["P1"])["Global"]
    assert found == {"records": 12, "valid": 4, "mass": pytest.approx(0.8), "P1": pytest.approx(0.4)}
    silent = other | {"mass": 0.49}
    rows = with_global({"a": one, "b": silent, "c": none}, ["P1"])
    assert rows["b"] == silent | {"P1": None}
    assert rows["Global"] == {"records": 8, "valid": 3, "mass": pytest.approx(0.9), "P1": pytest.approx(0.2)}
