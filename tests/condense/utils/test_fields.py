import pytest

from condense.utils.fields import MISSING, field_names, find_field

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        ({"a": {"b": {"c": 1}}}, "a.b.c", 1),
        ({"a.b": 2, "a": {"b": 1}}, "a.b", 2),
        ({"a.b": {"c": 3}, "a": {"b": 1}}, "a.b.c", 3),
        ({"a.b": {}, "a": {"b": {"c": 4}}}, "a.b.c", 4),
        ({"a": [{"b": 5}, {"b": 6}]}, "a.1.b", 6),
        ({"a": None}, "a", None),
        ({"a": {"b": 1}}, "a.c", MISSING),
        ({"a": 5}, "a.b", MISSING),
        ([5], "1", MISSING),
        # A table delivers absent objects as null, whose fields are null.
        ({"meta": None}, "meta.score", None),
        ({"meta": {"score": None}}, "meta.score", None),
    ],
)
def test_fields_within_objects(record, name, value):
    assert find_field(record, name) is value


def test_names():
    assert field_names({"a": {"b": 1, "c": 2}, "d": {}, "e": 3}) == "'a.b', 'a.c', 'd', 'e'"
    assert field_names({}) == "none"
