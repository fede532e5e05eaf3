"""Figures with the labels of other records, by hand and by all permutations; verdicts."""

from itertools import permutations

import pytest

from condense.labs.continuity.study.aggregation import SET
from condense.labs.continuity.study.classes import DIGITS
from condense.labs.continuity.study.control import NOT_DONE, RIGHT, compare, control_table, verdict, with_other_labels
from condense.labs.continuity.study.counts import Counting
from condense.labs.continuity.study.space import Space
from condense.labs.continuity.study.sums import Sums

pytestmark = pytest.mark.unit

FACTORS = [0.25, 0.5, 0.75, 1.0]


def counted(repetitions, *said):
    """Returns a record whose likeliest digits are these."""
    curves = {digit: [0.9 if digit == str(one) else 0.01 for one in said] for digit in DIGITS}
    allowed = {"exact": True, "published": True}
    return {"name": "-", "group": SET, "valid": True, "factors": FACTORS, "curves": curves, "allowed_by": allowed} | {
        "repetitions": repetitions
    }


def test_other_labels_are_those_of_shuffling():
    """The mean over all shuffles that leave no record its own label's place, counted one by one."""
    records = [{"said": said, "label": label} for said, label in ((1, 1), (2, 2), (2, 3), (4, 3))]
    measure = lambda record, label: {"right": float(record["said"] == label), "off": abs(record["said"] - label)}  # noqa: E731
    found = with_other_labels(records, lambda record: record["label"], measure)
    assert [own for own, _ in found["right"]] == [1, 1, 0, 0] and [own for own, _ in found["off"]] == [0, 0, 1, 1]
    for number, record in enumerate(records):
        orders = [order for order in permutations(range(4)) if order[number] != number]
        labels = [records[order[number]]["label"] for order in orders]
        for name in ("right", "off"):
            by_hand = sum(measure(record, label)[name] for label in labels) / len(labels)
            assert found[name][number][1] == pytest.approx(by_hand), (name, number)


def test_undefined_figures_leave_records_and_labels_out():
    records = [{"label": label} for label in (1, 1, 2, 3)]
    measure = lambda record, label: {"P": None if 3 in (record["label"], label) else float(label)}  # noqa: E731
    found = with_other_labels(records, lambda record: record["label"], measure)
    assert found["P"] == [(1.0, 1.5), (1.0, 1.5), (2.0, 1.0)]


def test_shares_have_wilsons_interval():
    found = compare({RIGHT: [(0.0, 0.25)] * 60})[RIGHT]
    assert found["own"] == {"mean": 0.0, "low": 0.0, "high": pytest.approx(0.0602, abs=1e-3)}
    assert found["difference"]["mean"] == found["difference"]["high"] == -0.25 and found["records"] == 60
    assert compare({"P1": []})["P1"]["own"] == {"mean": None, "low": None, "high": None}


def verdicts(probe, records):
    control = probe.summary(records)["control"]
    return {name: verdict(name, control) for name in control}


def test_a_model_that_counts_follows_its_labels():
    records = [counted(n, *(round(n * factor) for factor in FACTORS)) for n in (4, 8) * 8]
    found = verdicts(Counting, records)
    assert found[RIGHT] == "does the task" and found["distance from repetitions x duration"] == "follows its labels"
    exchanged = [counted(4, 2, 4, 6, 4), counted(8, 1, 2, 3, 8)] * 8
    assert verdicts(Counting, exchanged)["distance from repetitions x duration"] == "does not follow its labels"


def test_peaks_without_counting_are_not_evidence():
    """One model says 1, 2 and 3 of every word, and has three times as many peaks as a discrete reading predicts."""
    records = [counted(n, 1, 2, 3, 3) for n in (4, 5, 6) * 5]
    summary = Counting.summary(records)
    assert summary["ratio"] == pytest.approx(3) and summary["right_at_1"] == 0
    assert verdicts(Counting, records) == dict.fromkeys(summary["control"], "not evidence") | {RIGHT: NOT_DONE}
    (table,) = control_table({"m": summary}, set())
    assert table.rows[0][:4] == ["m", RIGHT, 15, "0.000 [0.000, 0.204]"] and table.rows[0][-1] == NOT_DONE
    (silent,) = control_table({"m": summary}, {"m"})
    assert {row[-1] for row in silent.rows} == {"does not answer"}
    assert control_table({"m": {}}, set()) == []


def summed(original, shrunk, *tops):
    curves = {digit: [0.9 if digit == top else 0.01 for top in tops] for digit in DIGITS}
    facts = {"original": original, "shrunk": shrunk, "published_other": []}
    return {"name": "-", "group": SET, "valid": True, "factors": FACTORS, "curves": curves} | facts


def test_sums_with_the_labels_of_other_sums():
    """Both are right and shrink to their own labels; with the other's they are wrong, so nothing can be compared."""
    control = Sums.summary([summed("6", ["2"], "2", "2", "6", "6"), summed("7", ["3"], "3", "3", "7", "7")])["control"]
    assert (control[RIGHT]["own"]["mean"], control[RIGHT]["others"]["mean"]) == (1, 0)
    assert control["P1"]["records"] == 0
    pair = [summed("6", ["2"], "2", "2", "6", "6"), summed("6", ["3"], "3", "3", "6", "6")]
    control = Sums.summary(pair)["control"]
    assert (control["P1"]["own"]["mean"], control["P1"]["others"]["mean"]) == (1, 0)
    assert (control["P3, published rule"]["own"]["mean"], control["P3, published rule"]["records"]) == (1, 2)


def test_one_answer_to_every_question_is_no_better_than_other_labels():
    def asked(number, kind, first, second):
        curves = {"yes": [float(first == "yes"), 0.5, float(second == "yes")]}
        curves["no"] = [1 - value for value in curves["yes"]]
        return {"name": f"{number} {kind}", "group": SET, "valid": True, "factors": [0, 0.5, 1], "curves": curves}

    kinds = ("both", "neither", "first", "second")
    records = [asked(number, kind, "no", "no") for number in range(5) for kind in kinds]
    control = Space.summary(records)["control"]
    assert control[RIGHT]["own"]["mean"] == 0.5 and verdict(RIGHT, control) == NOT_DONE
    right = {"both": ("yes", "yes"), "neither": ("no", "no"), "first": ("yes", "no"), "second": ("no", "yes")}
    records = [asked(number, kind, *right[kind]) for number in range(5) for kind in kinds]
    control = Space.summary(records)["control"]
    assert control[RIGHT]["own"]["mean"] == 1 and verdict(RIGHT, control) == "does the task"
