"""Figures of several models together."""

import pytest

from condense.eval.continuity.aggregation import with_global


def test_the_global_row_by_hand():
    """Three valid records of one model and one of another; a model without any has no figure."""
    one, other = {"records": 4, "valid": 3, "P1": 0.2}, {"records": 4, "valid": 1, "P1": 1.0}
    none = {"records": 4, "valid": 0, "P1": None}
    assert with_global({"a": one}, ["P1"]) == {"a": one}
    found = with_global({"a": one, "b": other, "c": none}, ["P1"])["Global"]
    assert found == {"records": 12, "valid": 4, "P1": pytest.approx(0.4)}
