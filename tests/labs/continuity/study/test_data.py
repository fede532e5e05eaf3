"""The package's data sets, and users' own."""

import json

import pytest

from condense.labs.continuity.study.aggregation import SET
from condense.labs.continuity.study.data import load
from condense.labs.continuity.study.metrics import shrunk_labels
from condense.labs.continuity.study.probes import PROBES
from condense.labs.continuity.study.prompts import step_char_spans, tutorial
from tests.conftest import SHARED

from .models import options, parts

pytestmark = pytest.mark.unit

AUTHORS = {
    "words": "words_with_repetitions.json",
    "tutorials": "counting_events_seq.json",
    "sums": "sums.json",
    "objects": "embedding_filtered.json",
}
SIZES = {"words": 200, "tutorials": 200, "sums": 200, "objects": 50}


def test_shipped_records_are_all_different():
    assert {name: len(load(name)) for name in SIZES} == SIZES
    assert len({(record["word"], record["repetitions"]) for record in load("words")}) == 200
    assert len({record["sentence"] for record in load("tutorials")}) == 200
    assert len({json.dumps(record) for record in load("sums")}) == 200
    assert len({frozenset(record["options"]) for record in load("objects")}) == 50


def test_shipped_words_and_objects():
    for record in load("words"):
        assert record["word"].isalpha() and record["word"].islower() and 1 <= record["repetitions"] <= 9
        assert record["category_with_article"] in (f"a {record['category']}", f"an {record['category']}")
    for record in load("objects"):
        assert list(record["questions"]) == ["both", "neither", "first", "second"]
        assert all(question.count("{}") == 1 and question.endswith("?") for question in record["questions"].values())


def test_shipped_tutorials_count_their_steps():
    for record in load("tutorials"):
        steps = parts(record["sentence"], step_char_spans(record["sentence"]))
        assert len(steps) == record["num_sentences"] == record["sentence"].count("\n- ")
        title = record["sentence"].split("\n")[0].removeprefix("Tutorial: ")
        assert record["sentence"] == tutorial(title, [step.removeprefix("- ") for step in steps])


def test_shipped_sums_can_tell_a_shrunk_number():
    """Two-digit numbers, each shrunk once. The right first digit is not among the shrunk labels."""
    by_question = {}
    for record in load("sums"):
        first, second = record["fields"]["item_1"], record["fields"]["item_2"]
        shrunk, rest = (first, second) if record["shrink_1"] else (second, first)
        assert 10 <= first <= 99 and 10 <= second <= 99
        assert str(first + second)[0] not in shrunk_labels(rest, shrunk)
        question = record["template"].format(**record["fields"])
        assert [int(word) for word in question.split() if word.isdecimal()] == [first, second]
        by_question.setdefault(question, []).append(record["shrink_1"])
    assert len(by_question) == 100 and all(sorted(both) == [False, True] for both in by_question.values())


@pytest.mark.parametrize("name", AUTHORS)
def test_the_authors_own_files(name):
    path = SHARED / "data" / "cct" / AUTHORS[name]
    if not path.exists():
        pytest.skip("needs ../shared/data/cct beside the checkout")
    records = load(name, path)
    assert len(records) == (54 if name == "objects" else 200)
    probe = {"words": "counting", "tutorials": "events", "sums": "sums", "objects": "space"}[name]
    items = [item for item in PROBES[probe].prompts(options(data=path)) if item.group == SET]
    assert len(items) == 200  # the first 50 pairs of objects
    if name == "objects":
        assert len([item for item in PROBES[probe].prompts(options(data=path, limit=54)) if item.group == SET]) == 216
    for item, record in zip(items, records, strict=False):
        if name == "words":
            assert parts(item.text, item.char_spans) == [record["word"]] * record["repetitions"]
        if name == "tutorials":
            assert len(item.char_spans) == record["num_sentences"] and item.text == record["sentence"]
        if name == "sums":
            number = record["fields"]["item_1" if record["shrink_1"] else "item_2"]
            assert parts(item.text, item.char_spans) == [str(number)]


WORD = {"word": "cat", "category": "animal", "category_with_article": "an animal", "repetitions": 3}
TUTORIAL = {"sentence": "How\n\n- a\n- b", "num_sentences": 2}
SUM = {"template": "{item_1} and {item_2} is ", "fields": {"item_1": 24, "item_2": 37}, "shrink_1": True}
OBJECTS = {"options": ["a", "b"], "questions": dict.fromkeys(("both", "neither", "first", "second"), "Is {}?")}
GOOD = {"words": WORD, "tutorials": TUTORIAL, "sums": SUM, "objects": OBJECTS}


def without(record, field):
    return {name: value for name, value in record.items() if name != field}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("words", without(WORD, "word"), "'word' is None and should be a str"),
        ("words", WORD | {"word": 3}, "'word' is 3 and should be a str"),
        ("words", WORD | {"repetitions": "3"}, "'repetitions' is '3' and should be a int"),
        ("words", WORD | {"repetitions": True}, "'repetitions' is True and should be a int"),
        ("words", WORD | {"repetitions": 10}, "'repetitions' is 10 and should be 1 to 9"),
        ("words", WORD | {"repetitions": 0}, "'repetitions' is 0 and should be 1 to 9"),
        ("words", "cat", "'word' is None"),
        ("tutorials", without(TUTORIAL, "num_sentences"), "'num_sentences' is None"),
        ("tutorials", TUTORIAL | {"sentence": "How\n\n* a\n* b"}, "begins with '- '"),
        ("tutorials", TUTORIAL | {"num_sentences": 12}, "'num_sentences' is 12"),
        ("sums", without(SUM, "shrink_1"), "'shrink_1' is None"),
        ("sums", SUM | {"fields": {"item_1": 24}}, r"\[24, None\] and should be whole numbers"),
        ("sums", SUM | {"fields": {"item_1": 24, "item_2": "37"}}, r"\[24, '37'\] and should be whole numbers"),
        ("sums", SUM | {"template": "{name}: {item_1} and {item_2}"}, "asks for 'name'"),
        ("sums", SUM | {"template": "{item_1} and {item_1}"}, "must have both {item_1} and {item_2}"),
        ("sums", SUM | {"template": "{item_2} and {item_2}"}, "must have both {item_1} and {item_2}"),
        ("objects", OBJECTS | {"options": ["a", "b", "c"]}, r"\['a', 'b', 'c'\] and should be two"),
        ("objects", OBJECTS | {"options": "ab"}, "'options' is 'ab' and should be a list"),
        ("objects", OBJECTS | {"questions": OBJECTS["questions"] | {"first": "Is it?"}}, "each with {} for the object"),
        ("objects", OBJECTS | {"questions": without(OBJECTS["questions"], "first")}, "should be both, neither, first"),
    ],
)
def test_a_malformed_record_is_named(name, wrong, message, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps([GOOD[name]]))
    assert load(name, path) == [GOOD[name]]
    path.write_text(json.dumps([GOOD[name], GOOD[name], wrong]))
    with pytest.raises(ValueError, match=rf"own\.json, record 2: .*{message}"):
        load(name, path)


@pytest.mark.parametrize("text", ["", "[{", "[]", "{}", "3", "null", json.dumps(WORD), "\udcff"])
def test_a_file_that_is_no_list_of_records_is_named(text, tmp_path):
    path = tmp_path / "own.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        ValueError, match=r"own\.json (cannot be read as JSON|is not a list of records|is an empty list)"
    ):
        load("words", path)
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        load("words", tmp_path / "nowhere.json")
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"own\.json is an empty list: the probe needs a record with word, category"):
        load("words", path)
