"""Prompts, and the spans of characters in them that vary."""

import pytest

from condense.labs.continuity.study.prompts import (
    FILLER,
    char_spans_of,
    counting_prompt,
    step_char_spans,
    sum_prompt,
    tutorial,
)

from .models import parts

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("template", ["sentence", "listed", "apart"])
def test_places_of_a_counted_word(template):
    """Also if the word is in the question, within itself or within its own category."""
    for word, category in (("apple", "fruit"), ("time", "sentence"), ("a", "animal"), ("cat", "cat"), ("aa", "aa")):
        text, char_spans = counting_prompt(word, 3, category, f"a {category}", template, num_fillers=2)
        assert parts(text, char_spans) == [word] * 3
        quoted = text.split('"')[1]
        assert quoted == " ".join([word] * 3)
        start = text.index(quoted)
        assert char_spans == [(start + n * (len(word) + 1), start + n * (len(word) + 1) + len(word)) for n in range(3)]
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
    assert char_spans_of("abcabcabc", "bc") == [(1, 3), (4, 6), (7, 9)]
    assert char_spans_of("abcabcabc", "bc", 2, 8) == [(4, 6)]
    assert char_spans_of("aaaa", "aa") == [(0, 2), (2, 4)]
    assert char_spans_of("abc", "x") == []


def test_places_of_steps():
    text = tutorial("How to - wait", ["Sit down.", "Wait - long.", "Get up."])
    assert parts(text, step_char_spans(text)) == ["- Sit down.", "- Wait - long.", "- Get up."]
    assert text == (
        "Tutorial: How to - wait\n\n- Sit down.\n- Wait - long.\n- Get up.\n\nQuestion: How many steps are necessary "
        "to complete the tutorial? Reply with a single-digit number\nAnswer: It takes "
    )
    assert parts("- a\n-b\n - c\n- d", step_char_spans("- a\n-b\n - c\n- d")) == ["- a", "- d"]


def test_places_of_numbers():
    template = "{name} has {item_1} of {item_2}, said {name} 82: "
    fields = {"name": "82", "item_1": 82, "item_2": 8}
    assert sum_prompt(template, fields, "item_1") == ("82 has 82 of 8, said 82 82: ", [(7, 9)])
    assert sum_prompt(template, fields, "item_2").char_spans == [(13, 14)]
