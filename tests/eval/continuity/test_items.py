"""Prompts and the places in them; data sets, shipped and of one's own; the items made of them."""

import json

import pytest

from eval.continuity import transformations
from eval.continuity.aggregation import SET
from eval.continuity.counts import Counting, Events
from eval.continuity.data import load
from eval.continuity.memory import Memory
from eval.continuity.metrics import (
    shrunk_labels,
)
from eval.continuity.probes import PROBES
from eval.continuity.prompts import (
    FILLER,
    PASSAGES,
    counting_prompt,
    places_of,
    step_places,
    sum_prompt,
    tutorial,
)
from eval.continuity.space import Boolean, Space
from eval.continuity.sums import Sums
from eval.continuity.transformations import Scaling, Translation
from tests.conftest import SHARED

from .models import options

AUTHORS = {
    "words": "words_with_repetitions.json",
    "tutorials": "counting_events_seq.json",
    "sums": "sums.json",
    "objects": "embedding_filtered.json",
}
SIZES = {"words": 200, "tutorials": 200, "sums": 200, "objects": 50}


# Prompts and places


def parts(text, places):
    return [text[start:end] for start, end in places]


@pytest.mark.parametrize("template", ["sentence", "listed", "apart"])
def test_places_of_a_counted_word(template):
    """Also of one that stands in the question, within itself or within its own category."""
    for word, category in (("apple", "fruit"), ("time", "sentence"), ("a", "animal"), ("cat", "cat"), ("aa", "aa")):
        text, places = counting_prompt(word, 3, category, f"a {category}", template, num_fillers=2)
        assert parts(text, places) == [word] * 3
        quoted = text.split('"')[1]
        assert quoted == " ".join([word] * 3)
        start = text.index(quoted)
        assert places == [(start + n * (len(word) + 1), start + n * (len(word) + 1) + len(word)) for n in range(3)]
        assert text.endswith("Answer: ") and text.count(FILLER) == (2 if template == "apart" else 0)
        assert (f"{category}s are listed" if template == "listed" else f"a {category} mentioned") in text


def test_the_papers_own_counting_prompt():
    assert counting_prompt("apple", 4, "fruit", "a fruit").text == (
        'Question: In the sentence "apple apple apple apple", how many times is a fruit mentioned? '
        "Reply with a single-digit number\nAnswer: "
    )
    assert counting_prompt("rose", 2, "flower", "a flower", "listed").text == (
        'Question: How many flowers are listed in the sentence "rose rose"? Reply with a single-digit number\nAnswer: '
    )


def test_places_between_two_characters():
    assert places_of("abcabcabc", "bc") == [(1, 3), (4, 6), (7, 9)]
    assert places_of("abcabcabc", "bc", 2, 8) == [(4, 6)]
    assert places_of("aaaa", "aa") == [(0, 2), (2, 4)]
    assert places_of("abc", "x") == []


def test_places_of_steps():
    text = tutorial("How to - wait", ["Sit down.", "Wait - long.", "Get up."])
    assert parts(text, step_places(text)) == ["- Sit down.", "- Wait - long.", "- Get up."]
    assert text == (
        "Tutorial: How to - wait\n\n- Sit down.\n- Wait - long.\n- Get up.\n\nQuestion: How many steps are necessary "
        "to complete the tutorial? Reply with a single-digit number\nAnswer: It takes "
    )
    assert parts("- a\n-b\n - c\n- d", step_places("- a\n-b\n - c\n- d")) == ["- a", "- d"]


def test_places_of_numbers():
    template = "{name} has {item_1} of {item_2}, said {name} 82: "
    fields = {"name": "82", "item_1": 82, "item_2": 8}
    assert sum_prompt(template, fields, "item_1") == ("82 has 82 of 8, said 82 82: ", [(7, 9)])
    assert sum_prompt(template, fields, "item_2").places == [(13, 14)]


def test_items_point_at_what_shrinks():
    """Every place of every item is a repeated word, a step, an event or a number."""
    for item in Counting.prompts(options()):
        words = set(parts(item.text, item.places))
        assert len(words) == 1 and len(item.places) == item.facts["repetitions"] and item.one_token
    for item in Events.prompts(options()):
        found = parts(item.text, item.places)
        assert len(found) == item.facts["repetitions"] and not item.one_token
        if item.group == SET:
            assert all(part.startswith("- ") for part in found) and item.text.count("\n- ") == len(found)
        else:
            assert tuple(found) == PASSAGES[item.name][1] and item.text.startswith("Question: ")
    for item in Sums.prompts(options()):
        assert len(item.places) == (1 if item.vary == "shrink" else 0)
        assert all(part.isdecimal() and len(part) == 2 for part in parts(item.text, item.places))


# Data


@pytest.mark.parametrize("name", SIZES)
def test_shipped_data(name):
    assert len(load(name)) == SIZES[name]


def test_shipped_records_are_all_different():
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
        steps = parts(record["sentence"], step_places(record["sentence"]))
        assert len(steps) == record["num_sentences"] == record["sentence"].count("\n- ")
        title = record["sentence"].split("\n")[0].removeprefix("Tutorial: ")
        assert record["sentence"] == tutorial(title, [step.removeprefix("- ") for step in steps])


def test_shipped_sums_can_tell_a_shrunk_number():
    """Two-digit numbers, each shrunk once; the right first digit is none of the shrunk ones."""
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
            assert parts(item.text, item.places) == [record["word"]] * record["repetitions"]
        if name == "tutorials":
            assert len(item.places) == record["num_sentences"] and item.text == record["sentence"]
        if name == "sums":
            number = record["fields"]["item_1" if record["shrink_1"] else "item_2"]
            assert parts(item.text, item.places) == [str(number)]


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
        ("sums", SUM | {"template": "{item_1} and {item_1}"}, "has no {item_1} or no {item_2}"),
        ("sums", SUM | {"template": "{item_2} and {item_2}"}, "has no {item_1} or no {item_2}"),
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
    with pytest.raises(ValueError, match=r"own\.json (cannot be read as JSON|is no list of records)"):
        load("words", path)
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        load("words", tmp_path / "nowhere.json")


# Items


def test_how_many_items_there_are():
    found = {name: len(probe.prompts(options())) for name, probe in PROBES.items()}
    assert found == {
        "counting": 203,
        "events": 203,
        "sums": 5 * 8 + 200,
        "space": 6 + 7 + 4 + 200,
        "boolean": 4 * 4,
        "translation": 4,
        "scaling": 4,
        "density": 2 * 4 + 2 * 4,
        "memory": (4 + 3) * (3 + 20) + 20,
    }


@pytest.mark.parametrize("name", PROBES)
def test_no_two_items_are_kept_under_one_key(name):
    items = PROBES[name].prompts(options())
    assert len({(item.name, item.group) for item in items}) == len(items)


def test_limits_take_the_first_records():
    for name in ("counting", "events", "sums"):
        every, some = (PROBES[name].prompts(options(limit=limit)) for limit in (None, 7))
        assert [item for item in every if item.group == SET][:7] == [item for item in some if item.group == SET]
    assert len(Space.prompts(options(limit=3))) == 17 + 12
    assert len(Memory.prompts(options(limit=2))) == (4 + 3) * 5 + 2
    assert len(Memory.prompts(options(limit=200))) == (4 + 3) * 203 + 20


def test_factors_of_the_papers():
    def ends(items):
        return {(len(item.factors), round(item.factors[0], 9), round(item.factors[-1], 9)) for item in items}

    assert ends(Counting.prompts(options())) == {(100, 0.1, 1)}
    passages, tutorials = Events.prompts(options())[:3], Events.prompts(options())[3:]
    assert ends(passages) == {(100, 0.1, 1)} and ends(tutorials) == {(40, 0.1, 1)}
    of_sums = {item.group: item for item in Sums.prompts(options())}
    assert {group: next(iter(ends([item]))) for group, item in of_sums.items()} == {
        "duration": (100, 0.1, 1),
        "embedding": (100, 0, 1),
        "translation": (100, 0, 1),
        "scaling": (100, 0.05, 1),
        "density": (10, 1, 10),
        SET: (100, 0.1, 1),
    }
    between = Space.prompts(options(limit=1))
    assert ends(between[:17]) == {(100, 0, 1)} and ends(between[17:]) == {(40, 0, 1)}
    assert ends(Boolean.prompts(options())) == {(100, 0, 1)}
    assert ends(Translation.prompts(options())) == {(100, 0, 10)}
    assert ends(Scaling.prompts(options())) == {(100, 0.05, 2)}
    assert ends(transformations.density_items()) == {(10, 1, 10)}


def test_what_turns_into_what():
    items = {item.name: item for item in Space.prompts(options(limit=1))}
    red = items["Are ★ red?, ★ from apples to bananas"]
    assert red.text == "Question: Are apples red? (yes/no)\nAnswer:" and red.watched == "yes_no"
    assert red.other == "Question: Are bananas red? (yes/no)\nAnswer:"
    bought = items["Alice bought some ★ at the, ★ from apples to bananas"]
    assert (bought.text, bought.other) == ("Alice bought some apples at the", "Alice bought some bananas at the")
    assert bought.watched == "tokens"
    record = load("objects")[0]
    for kind, question in record["questions"].items():
        first, second = (question.replace("{}", option) for option in record["options"])
        item = items[f"0 {kind}"]
        assert (item.text, item.other) == (
            f"Question: {first} (yes/no)\nAnswer:",
            f"Question: {second} (yes/no)\nAnswer:",
        )
    operators = {item.name: item for item in Boolean.prompts(options())}
    item = operators["0 AND to XOR 1"]
    assert item.text == "Question: What is 0 AND 1? Reply with 0 or 1\nAnswer: " and "What is 0 XOR 1?" in item.other
    turned = {item.group: item for item in Sums.prompts(options()) if item.name == "24 + 13"}
    assert turned["embedding"].other == "The sum of 24 and 31 is " and turned["embedding"].text.endswith(
        "24 and 13 is "
    )


def test_labels_of_sums(tmp_path):
    records = [SUM, SUM | {"shrink_1": False}]
    (tmp_path / "own.json").write_text(json.dumps(records))
    first, second = (item for item in Sums.prompts(options(data=tmp_path / "own.json")) if item.group == SET)
    assert first.facts == {"original": "6", "shrunk": ["3", "4"]} and parts(first.text, first.places) == ["24"]
    assert second.facts == {"original": "6", "shrunk": ["2", "3"]} and parts(second.text, second.places) == ["37"]
