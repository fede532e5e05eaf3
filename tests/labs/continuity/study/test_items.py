"""The items of every probe: texts, spans, factors, and how many there are."""

import json

import pytest

from condense.labs.continuity.study import transformations
from condense.labs.continuity.study.aggregation import SET
from condense.labs.continuity.study.counts import Counting, Events
from condense.labs.continuity.study.data import load
from condense.labs.continuity.study.memory import Memory
from condense.labs.continuity.study.probes import PROBES
from condense.labs.continuity.study.prompts import PASSAGES
from condense.labs.continuity.study.space import Boolean, Space
from condense.labs.continuity.study.sums import Sums
from condense.labs.continuity.study.transformations import Scaling, Translation

from .models import options, parts

pytestmark = pytest.mark.unit


def test_items_point_at_what_shrinks():
    """Every span of every item is a repeated word, a step, an event or a number."""
    for item in Counting.prompts(options()):
        words = set(parts(item.text, item.char_spans))
        assert len(words) == 1 and len(item.char_spans) == item.facts["repetitions"] and item.one_token
        assert all(word and word == word.strip() for word in words)
    for item in Events.prompts(options()):
        found = parts(item.text, item.char_spans)
        assert len(found) == item.facts["repetitions"] and not item.one_token
        assert all(part and part == part.strip() for part in found)
        if item.group == SET:
            assert all(part.startswith("- ") for part in found) and item.text.count("\n- ") == len(found)
        else:
            assert tuple(found) == PASSAGES[item.name][1] and item.text.startswith("Question: ")
    for item in Sums.prompts(options()):
        assert len(item.char_spans) == (1 if item.vary == "shrink" else 0)
        assert all(part.isdecimal() and len(part) == 2 for part in parts(item.text, item.char_spans))


def test_how_many_items_there_are():
    found = {name: len(probe.prompts(options())) for name, probe in PROBES.items()}
    expected = {"counting": 203, "events": 203, "sums": 5 * 8 + 200, "space": 6 + 7 + 4 + 200, "boolean": 4 * 4}
    expected |= {"translation": 4, "scaling": 4, "density": 2 * 4 + 2 * 4, "memory": (4 + 3) * (3 + 20) + 20}
    expected["wholes"] = 3 * 20
    assert found == expected


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
    expected = {"duration": (100, 0.1, 1), SET: (100, 0.1, 1), "embedding": (100, 0, 1), "translation": (100, 0, 1)}
    expected |= {"scaling": (100, 0.05, 1), "density": (10, 1, 10)}
    assert {group: next(iter(ends([item]))) for group, item in of_sums.items()} == expected
    between = Space.prompts(options(limit=1))
    assert ends(between[:17]) == {(100, 0, 1)} and ends(between[17:]) == {(40, 0, 1)}
    assert ends(Boolean.prompts(options())) == {(100, 0, 1)}
    assert ends(Translation.prompts(options())) == {(100, 0, 10)}
    assert ends(Scaling.prompts(options())) == {(100, 0.01, 1.5)}
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
        asked = [f"Question: {question} (yes/no)\nAnswer:" for question in (first, second)]
        assert [item.text, item.other] == asked
    operators = {item.name: item for item in Boolean.prompts(options())}
    item = operators["0 AND to XOR 1"]
    assert item.text == "Question: What is 0 AND 1? Reply with 0 or 1\nAnswer: " and "What is 0 XOR 1?" in item.other
    turned = {item.group: item for item in Sums.prompts(options()) if item.name == "24 + 13"}
    sums = turned["embedding"]
    assert sums.other == "The sum of 24 and 31 is " and sums.text.endswith("24 and 13 is ")


def test_labels_of_sums(tmp_path):
    one = {"template": "{item_1} and {item_2} is ", "fields": {"item_1": 24, "item_2": 37}, "shrink_1": True}
    records = [one, one | {"shrink_1": False}]
    (tmp_path / "own.json").write_text(json.dumps(records))
    first, second = (item for item in Sums.prompts(options(data=tmp_path / "own.json")) if item.group == SET)
    for item, shrunk, number in ((first, ["3", "4"], "24"), (second, ["2", "3"], "37")):
        assert item.facts == {"original": "6", "shrunk": shrunk, "published_other": []}
        assert parts(item.text, item.char_spans) == [number]
