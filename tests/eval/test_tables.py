"""Tables of records, against tables written out by hand."""

import pytest

from condense.eval.tables import key_by, pivot, select, table

pytestmark = pytest.mark.unit

RECORDS = [
    {"model": "a", "kind": "who", "length": 512, "right": 3},
    {"model": "a", "kind": "what", "length": 2048, "right": 4},
    {"model": "b", "kind": "who", "length": 512, "right": 5},
]


def test_records_are_selected_by_all_fields():
    assert select(RECORDS, model="a", kind="who") == RECORDS[:1]
    assert select(RECORDS) == RECORDS and select(RECORDS, model="c") == []


def test_columns_are_the_keys_in_the_order_in_which_they_appear():
    made = table("t", [{"model": "a", "0": 1}, {"model": "b", "0": 2, "512": 3}, {"512": 4}])
    assert (made.title, made.columns) == ("t", ["model", "0", "512"])
    assert made.rows == [["a", 1, ""], ["b", 2, 3], ["", "", 4]]


def test_a_pivot_has_the_asked_rows_and_columns():
    """Its order is theirs, and a place without a record is shown too."""
    cells, rows = key_by(select(RECORDS, model="a"), "kind", "length"), {("what",): ["What?"], ("who",): ["Who?"]}
    made = pivot("t", ["kind"], cells, rows, {2048: "2,048", 512: "512"}, lambda one: one["right"] if one else "-")
    assert made.columns == ["kind", "2,048", "512"]
    assert made.rows == [["What?", 4, "-"], ["Who?", "-", 3]]
