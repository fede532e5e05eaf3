"""The published code's rules beside ours: spans of split words, classes by substring, P1 to P3 of sums, and mass."""

import json

import numpy as np
import pytest
from matplotlib.axes import Axes

from condense.labs.continuity.model.spans import containing_span
from condense.labs.continuity.study.aggregation import LEAST_MASS, SET, mass
from condense.labs.continuity.study.classes import DIGITS, watched_classes
from condense.labs.continuity.study.counts import Counting, Events
from condense.labs.continuity.study.items import Item
from condense.labs.continuity.study.memory import Memory
from condense.labs.continuity.study.metrics import (
    peak_frequencies,
    published_other_labels,
    published_sum_properties,
    sum_properties,
)
from condense.labs.continuity.study.pictures import _mean, shown_curves
from condense.labs.continuity.study.prompts import counting_prompt
from condense.labs.continuity.study.space import Boolean, Space
from condense.labs.continuity.study.sums import Sums
from condense.labs.continuity.study.transformations import Scaling
from condense.training.small_llama import word_tokenizer
from tests.conftest import SHARED

from .models import options, parts, stock_reader
from .test_metrics import digit_curves, record_of, tokens_as


def test_a_word_that_is_split_once_shrinks_from_its_first_whole_token():
    """After a quotation mark, the first "mall" is two tokens; the later ones are one token each."""
    tokenizer = tokens_as(['"', "m", "all", " mall", " in"])
    text = '"mall mall mall" in'
    assert [tokenizer.decode([n]) for n in tokenizer(text)["input_ids"]][:5] == ['"', "m", "all", " mall", " mall"]
    assert containing_span(tokenizer, text, "mall", "mall") == range(3, 5)
    with pytest.raises(ValueError, match="no token contains 'ball'"):
        containing_span(tokenizer, text, "ball", "mall")
    with pytest.raises(ValueError, match="that contains 'in' comes after the last one that contains 'm'"):
        containing_span(tokenizer, text, "in", "m")


def test_a_span_is_searched_between_two_markers():
    tokenizer = word_tokenizer(["82 and 28."])
    text = "82 and 28."
    assert containing_span(tokenizer, text, "8", "2", None, "and") == range(0, 2)
    assert containing_span(tokenizer, text, "2", "8", "and", ".") == range(3, 5)
    assert containing_span(tokenizer, text, "8", "8") == range(0, 5)


def test_both_rules_for_spans_are_counted():
    """Our rule does not measure a split word, and the published rule does."""
    text, char_spans = counting_prompt("mall", 3, "place", "a place")
    rest = sorted({*text.replace("mall", "").replace('"', " ").split(), *DIGITS}, key=len)
    tokenizer = tokens_as(['"', "m", "all", " mall", " ", "\n", *rest])
    item = next(item for item in Counting.prompts(options(limit=1)) if item.group == SET)
    item = type(item)(**{**vars(item), "text": text, "char_spans": char_spans, "containing": ("mall", "mall")})
    reader = stock_reader(tokenizer)
    record = reader.record(item)
    assert not record["valid"] and record["allowed_by"] == {"exact": False, "published": True}
    published = reader._replace(spans="published")
    assert published.record(item)["valid"]
    names = [tokenizer.decode([n]) for n in tokenizer(text)["input_ids"]]
    assert [names[n] for n in published.tokens(item)] == [" mall", " mall"]
    found = Counting.summary([record])
    assert (found["allowed_exact"], found["allowed_published"], found["valid"]) == (0, 1, 0)
    (row, *papers) = Counting.summary_tables({"a": found})[0].rows
    assert row[1:3] == ["0.00 %", "100.00 %"] and all(paper[1] == "" for paper in papers)


def test_events_shrink_over_the_lines_between_them():
    text = "How\n- a.\n- b.\nHow"
    tokenizer = tokens_as(["How", "- a.", "- b.", "\n"])
    tokens = [tokenizer.decode([n]) for n in tokenizer(text)["input_ids"]]
    assert tokens == ["How", "\n", "- a.", "\n", "- b.", "\n", "How"]
    item = next(item for item in Events.prompts(options(limit=1)) if item.group == SET)
    assert item.containing == ("-", ".")
    assert containing_span(tokenizer, text, *item.containing) == range(2, 5)


def test_published_classes_contain_the_answer():
    texts = ["1", "21", "10", " no", "know", "yesno", "Yes", "0", "<0x31>", "true", "FALSE", *DIGITS[2:]]
    tokenizer = tokens_as(texts)
    found = watched_classes(tokenizer, "digits", "published")
    assert [texts[n] for n in found["1"]] == ["1", "21"] and [texts[n] for n in found["0"]] == ["10", "0"]
    assert found == watched_classes(tokenizer, "first_digits", "published")
    found = watched_classes(tokenizer, "yes_no", "published")
    assert [[texts[n] for n in found[name]] for name in ("yes", "no")] == [["yesno", "Yes"], [" no", "know"]]
    found = watched_classes(tokenizer, "bits", "published")
    named = [[texts[n] for n in found[bit]] for bit in "10"]
    assert named == [["1", "21", "10", "true"], ["0", "FALSE"]]
    assert [texts[n] for n in watched_classes(tokenizer, "digits")["1"]] == ["1"]


def test_published_others_by_hand():
    assert published_other_labels(24, 37) == set()  # 24 to 33: 2 and 3, both shrunk labels
    assert published_other_labels(38, 82) == {"3"}  # 38 to 47: 3 and 4, of which 4 is a shrunk label
    assert published_other_labels(37, 12) == set()  # 37 to 46: 3 is a shrunk label, 4 the right one


def naive_published(curves, original, shrunk, others):
    count = len(curves[original])
    together = [sum(curves[label][n] for label in shrunk) for n in range(count)]
    leads = [n for n in range(count) if together[n] > curves[original][n]]
    p2 = any(all(together[n] > curves[label][n] for label in others) for n in leads)
    beaten = any(together[n] < curves[label][n] for n in leads for label in others)
    last = [together[-1], *(curves[label][-1] for label in others)]
    valid = all(curves[original][-1] > value for value in last)
    return {"valid": valid, "P1": bool(leads), "P2": p2, "P3": p2 and not beaten}


def test_published_properties_against_a_loop():
    random, seen, other_than_ours = np.random.default_rng(0), set(), 0
    for _ in range(600):
        values = random.dirichlet(np.full(10, 0.3), 3)
        labels = random.permutation(10)
        values[:, labels[:4]] += random.random() * random.random((3, 4))
        curves = {digit: values[:, n].tolist() for n, digit in enumerate(DIGITS)}
        original, *rest = (str(label) for label in labels)
        shrunk, others = set(rest[:2]), set(rest[2 : 2 + random.integers(0, 3)])
        if random.random() < 0.1:
            shrunk |= {original}
        found = published_sum_properties(curves, original, shrunk, others)
        assert found == naive_published(curves, original, shrunk, others)
        seen.add(tuple(found.values()))
        other_than_ours += found != sum_properties(curves, original, shrunk)
    assert len(seen) == 8 and other_than_ours > 50


def test_both_rules_for_sums_in_one_table():
    """9 is once on top: P3 fails by the paper's text but not by its code, which does not count 9 as a label."""
    curves = digit_curves(*"...", d6=[0.2, 0.1, 0.6], d2=[0.5, 0.1, 0.1], d9=[0.1, 0.4, 0.1])
    record = record_of(curves=curves, original="6", shrunk=["2", "3"], published_other=[]) | {"factors": [0.1, 0.5, 1]}
    rates, table = Sums.summary_tables({"a": Sums.summary([record])})
    assert rates.rows[0][1:5] == ["100.00 %", "1 of 1", "100.00 %", "1 of 1"]
    assert table.rows[0][1:7] == ["100.00 %", "100.00 %", "0.00 %", "100.00 %", "100.00 %", "100.00 %"]
    assert all(row[1:4] == ["", "", ""] and row[4].endswith("%") for row in table.rows[1:])


def test_the_papers_sums_have_no_others_in_half_of_the_records():
    path = SHARED / "data" / "cct" / "sums.json"
    if not path.exists():
        pytest.skip("needs ../shared/data/cct beside the checkout")
    items = [item for item in Sums.prompts(options(data=path)) if item.group == SET]
    assert sum(not item.facts["published_other"] for item in items) == 100
    assert len(json.loads(path.read_text())) == len(items) == 200


def test_a_model_that_gives_no_answer_has_no_figures():
    silent = [record_of(curves=digit_curves("1", "4") | {"1": [0.2, 0.0], "4": [0.0, 0.2]}, repetitions=4)]
    assert mass(silent) == pytest.approx(0.28) and mass(silent) < LEAST_MASS
    loud = [record_of(curves=digit_curves("1", "4"), repetitions=4)]
    tables = Counting.summary_tables({"silent": Counting.summary(silent), "loud": Counting.summary(loud)})
    rows = {row[0]: row for row in tables[1].rows}
    assert rows["silent"][1:4] == ["-", "-", "-"] and rows["silent"][-1] == "28.00 %"
    assert rows["loud"][2] == rows["Global"][2] == "0.5000"
    assert tables[1].columns[-1] == "mass of digits (below 50%: no figures)"


def test_a_silent_memory_has_no_figures():
    """As in the other tables. A summary of an earlier version has no mass and keeps its figures."""
    frequencies = peak_frequencies(digit_curves("1", "4"), 4)
    values = {"valid": 1, "right_at_1": 1.0, **frequencies}
    found = {"distances": {0: values | {"mass": 0.9}, 1: values | {"mass": 0.3}, 2: values}, "dials": {}}
    table, _ = Memory.summary_tables({"m": found})
    figures = ["100.00 %", "0.2500", "0.5000", "0.5000"]
    assert [row[3:] for row in table.rows] == [[*figures, "90.00 %"], ["-"] * 4 + ["30.00 %"], [*figures, "-"]]


def test_authors_prompts_are_templates():
    """Spaced digits, the authors' question about truth values, and their sentences for usage and repetition."""
    item, turned = Sums.prompts(options(template="spaced", limit=1))[:2]
    assert item.text == "The sum of 2 4 and 1 3 is " and parts(item.text, item.char_spans) == ["1 3"]
    assert turned.other == "The sum of 2 4 and 3 1 is "
    item = Boolean.prompts(options(template="published"))[1]
    asked = "Question: What is the truth value of the following statement?\n0 {} 1\nAnswer (0 or 1): "
    assert (item.text, item.other) == (asked.format("AND"), asked.format("OR"))
    own, published = (
        {item.text: item.other for item in Space.prompts(options(template=template, limit=1))}
        for template in ("sentence", "published")
    )
    assert published["Question: Repeat the word forks. Answer:"] == "Question: Repeat the word spoons. Answer:"
    assert published["cats are usually kept as"] == "dogs are usually kept as"
    assert "Repeat the word cats." in own and "Repeat the word cats." not in published
    with pytest.raises(ValueError, match=r"template='spaced' is unknown to boolean: choose sentence or published\."):
        Boolean.check(options(template="spaced"))


def test_factors_without_a_position_are_counted(tmp_path):
    """A record that loses factors still counts in the means of its other factors."""
    whole = record_of(curves=digit_curves("1", "4"), repetitions=4)
    short = record_of(curves=digit_curves("2"), repetitions=4, left_out=[0.5], because="no place") | {"factors": [1.0]}
    model = {"name": "m", "summary": Counting.summary([whole, short]), "records": [whole, short]}
    assert Counting.tables({"models": [model]})[-1].rows == [["m", "no place", 1, 1]]
    assert _mean([whole, short], [np.array([1, 4]), np.array([2])]) == ([0.5, 1.0], [1.0, 3.0])
    lost = {"name": "x", "valid": True, "factors": [0.0, 1.0], "distance": [0.0, 0.5], "same_top": [True, False]}
    for left_out, last in (([1.5], "-"), ([-1.0], "0.5")):
        found = Scaling.summary([lost | {"left_out": left_out}])
        assert Scaling.summary_tables({"m": found})[0].rows[0] == ["m", "x", "0.5", last, "50.00 %", "-"]


def test_every_curve_of_five_percent_is_drawn():
    likely = {f"token {n}": [0.01, 0.06] for n in range(14)} | {"low": [0.01, 0.02]}
    shown = shown_curves(record_of(curves={}, likely=likely, unwatched=list(likely)[:14]))
    assert len(shown) == 15 and "low" not in shown and shown["other tokens"][1] == pytest.approx(1 - 14 * 0.06)


@pytest.mark.parametrize(("mass", "title"), [(0.9, "m"), (0.012, "m\nno answer: their mass is 1.20 %")])
def test_the_picture_of_a_set_says_when_a_model_gives_no_answer(mass, title, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda panel, text, **_: titles.append(text))
    record = record_of(curves=digit_curves("1", "4"), repetitions=4)
    model = {"name": "m", "summary": Counting.summary([record]) | {"mass": mass}, "records": [record]}
    Counting.draw({"models": [model]}, tmp_path / "counting")
    assert titles == [title]


def test_names_of_many_curves_do_not_narrow_the_panels(tmp_path, monkeypatch):
    """They stand below the panels, which stay as wide as panels with few curves."""
    widths = []

    def noted(figure, _):
        figure.draw_without_rendering()  # lays the panels out
        widths.append(figure.axes[0].get_position().width)

    monkeypatch.setattr("condense.eval.results._save", noted)
    for many in (2, 14):
        likely = {f"token {n}": [0.06, 0.06] for n in range(many)}
        fields = {"curves": digit_curves("1", "4"), "likely": likely, "unwatched": list(likely)}
        records = [record_of(group="words", repetitions=4, **fields) for _ in range(4)]
        Counting.draw({"models": [{"name": "m", "summary": {}, "records": records}]}, tmp_path / str(many))
    assert len(widths) == 2 and widths[1] == pytest.approx(widths[0], rel=0.1) and widths[0] > 0.15


def test_a_likely_token_beside_the_digits_is_drawn():
    """A model says "the" if asked for a digit: the token is named and not hidden among the others."""
    words = ["the", "a", "cat", "dog"]
    record = stock_reader(tokens_as([*words, *DIGITS])).record(Item("x", "words", "the4cat", "scale", (1.0,), "digits"))
    assert record["unwatched"] == [name for name in words if name in record["likely"]] != []
    shown = shown_curves(record)
    for name in record["unwatched"]:
        assert shown[f"“{name}”"].tolist() == record["likely"][name]
    rest = shown["other tokens"] + shown["other digits"]
    named = [curve for name, curve in shown.items() if not name.startswith("other")]
    assert sum(named) + rest == pytest.approx([1.0])


def test_a_model_that_gives_no_answer_is_not_in_the_rows_of_all_models():
    """One model answers and has one of 2 records right; the other model's digits have a fifth of the probability."""
    right = digit_curves(*"..", d6=[0.6, 0.6])
    wrong = digit_curves(*"..", d6=[0.2, 0.2], d2=[0.5, 0.5])
    labels = {"original": "6", "shrunk": ["2"], "published_other": []}
    loud = [record_of(curves=curves, **labels) for curves in (right, wrong)]
    silent = [record_of(curves={name: [v / 5 for v in curve] for name, curve in right.items()}, **labels)]
    rates, _ = Sums.summary_tables({"loud": Sums.summary(loud), "silent": Sums.summary(silent)})
    rows = {row[0]: row for row in rates.rows}
    assert rows["silent"][1:5] == ["-", "-", "-", "-"] and rows["Global"][1:5] == rows["loud"][1:5]
    assert rows["Global"][2] == "1 of 2"


def test_results_of_earlier_versions_are_shown():
    """They have no mass and a single rule: their figures are shown as measured, and "-" for the rest."""
    records = [record_of(curves=digit_curves("1", "4"), repetitions=4)]
    new = Counting.summary(records)
    later = ("mass", "proportion_error", "allowed_exact", "allowed_published")
    old = {name: value for name, value in new.items() if name not in later}
    tables = Counting.summary_tables({"a": old, "b": old})
    assert tables[0].rows[0] == ["a", "100.00 %", "-", 1, "100.00 %", "-", "-"]
    assert tables[0].rows[2] == ["Global", "100.00 %", "-", 2, "100.00 %", "-", "-"]
    assert tables[1].rows[0][1:] == ["0.2500", "0.5000", "2.00", "-"]
    rates, shares = Sums.summary_tables({"a": {"records": 4, "posed": 4, "valid": 2, "P1": 0.5, "P2": 0.5, "P3": 0.0}})
    assert rates.rows[0] == ["a", "50.00 %", "2 of 4", "-", "-", "-"]
    assert shares.rows[0] == ["a", "50.00 %", "50.00 %", "0.00 %", "-", "-", "-", "-"]
