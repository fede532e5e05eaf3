"""Means over the runs of a model: by hand, for each probe, and from the command line."""

import json
from collections import defaultdict
from math import sqrt

import pytest
import torch
from transformers import AutoTokenizer

from condense.eval.intervals import mean_and_interval
from condense.labs.continuity.model import ContinuousLM, Sentence
from condense.labs.continuity.study import transformations
from condense.labs.continuity.study.counts import Counting, Events
from condense.labs.continuity.study.memory import DISTANCES, Memory
from condense.labs.continuity.study.probes import PROBES
from condense.labs.continuity.study.questions import questions_tokenizer
from condense.labs.continuity.study.runs import over_runs, runs_table
from condense.labs.continuity.study.space import Boolean, Space
from condense.labs.continuity.study.sums import Sums
from condense.labs.continuity.study.transformations import Scaling

from .models import llama, probe
from .test_metrics import digit_curves, record_of

pytestmark = pytest.mark.unit

T_975 = 4.302653  # for two degrees of freedom, from a table


def test_the_interval_by_hand():
    figures = {"a#0": {"x": 1.0}, "a#1": {"x": 2.0}, "a#2": {"x": 6.0}, "b": {"x": 9.0}, "c#1": {"x": 9.0}}
    found = over_runs(figures, ["x"])
    assert list(found) == ["a"]  # the others have a single run
    half = T_975 * sqrt((4 + 1 + 9) / 2) / sqrt(3)
    assert half > 3  # the interval is clipped at 0
    assert found["a"]["x"] == {"values": [1, 2, 6], "mean": 3, "low": 0, "high": pytest.approx(3 + half)}
    assert runs_table(found).rows == [["x", "3 [0, 9.572]"]]
    assert runs_table(found).columns == ["figure", "a, 3 runs"]


def test_intervals_end_where_values_end():
    runs = {"a#0": {"x": 0.9}, "a#1": {"x": 1.0}, "a#2": {"x": 1.0}}
    mean, half = 2.9 / 3, T_975 * 0.1 / 3  # the standard error is 0.1 / 3
    share, ratio = (over_runs(runs, above_one)["a"]["x"] for above_one in ((), ("x",)))
    assert (share["low"], share["high"]) == (pytest.approx(mean - half), 1)
    assert ratio["high"] == pytest.approx(mean + half) and mean + half > 1
    difference = mean_and_interval([-1, 0])
    assert difference["low"] < -1 and difference["high"] > 0


def test_a_run_that_does_not_answer_takes_the_mean_away():
    alone = {"#": {"x": 1.0}, "#1": {"x": 1.0}, "b#x": {}, "b#y": {}}
    found = over_runs({"a#0": {"x": 1.0, "y": 0.5}, "a#1": {"x": None, "y": 0.5}} | alone)
    half = {"values": [0.5, 0.5], "mean": 0.5, "low": 0.5, "high": 0.5}
    assert found == {"a": {"x": {"values": [1, None], "mean": None, "low": None, "high": None}, "y": half}}
    assert runs_table(found).rows == [["x", "- (1 of 2 runs have one)"], ["y", "0.5"]]


def test_a_figure_of_some_runs_does_not_depend_on_their_order():
    one, both = {"x": 1.0}, {"x": 2.0, "y": 3.0}
    for figures in ({"a#0": one, "a#1": both}, {"a#0": both, "a#1": one}):
        assert [row[1] for row in runs_table(over_runs(figures)).rows if row[0] == "y"] == ["- (1 of 2 runs have one)"]


def test_models_side_by_side():
    figures = {f"{model}#{run}": {"x": run + offset} for model, offset in (("a", 0), ("b", 10)) for run in (0, 1)}
    table = runs_table(over_runs(figures | {"b#2": {"x": 11.0}}))
    assert table.columns == ["figure", "a, 2 runs", "b, 3 runs"] and table.rows[0][1].startswith("0.5 [0, 1")


def test_figures_of_the_probes():
    """Figures of summaries of hand-made records; None if other tokens have most of the probability."""
    record = record_of(repetitions=2)
    answered = record | {"curves": digit_curves(*"..", rest=0.0, d1=[0.9, 0.1], d2=[0.0, 0.8])}
    silent = record | {"curves": digit_curves(*"..", rest=0.0, d1=[0.09, 0.01], d2=[0.0, 0.08])}
    found = Counting.figures(Counting.summary([answered]))
    assert found["right count at durations of 1"] == found["observed"] == found["observed, expected peaks only"] == 1
    assert found["counterfactual"] == 0.5 and found["average ratio"] == found["average ratio, expected peaks only"] == 2
    assert found["valid, exact spans"] == 1 and found["mass of digits"] == pytest.approx(0.9)
    mute = Counting.figures(Counting.summary([silent]))
    assert mute["observed"] is None and mute["valid, exact spans"] == 1
    assert mute["mass of digits"] == pytest.approx(0.09)
    assert found["mean distance from repetitions x duration"] == 0  # 1 at 2 x 0.5, and 2 at 2 x 1
    labels = {"original": "2", "shrunk": ["1"], "published_other": []}
    sums = Sums.figures(Sums.summary([answered | labels]))
    assert [sums[name] for name in ("valid", "P1", "P2", "P3", "P3, published rule")] == [1, 1, 1, 1, 1]
    assert Sums.figures(Sums.summary([silent | labels]))["P1"] is None
    between = record | {"name": "0 both", "curves": {"yes": [0.6, 0.9], "no": [0.4, 0.1]}}
    space = Space.figures(Space.summary([between]))
    assert (space["valid"], space["mean m_max"], space["mass of yes and no"]) == (1, 0, pytest.approx(1))
    bits = record | {"factors": [0, 0.5, 1], "curves": {"0": [0.5, 0.1, 0.5], "1": [0.5, 0.9, 0.5]}}
    assert Boolean.figures(Boolean.summary([bits])) == {"x: most outside the ends": pytest.approx(0.4)}
    few = record | {"factors": [0, 0.5, 1], "curves": {"0": [0.1, 0.1, 0.1], "1": [0.1, 0.1, 0.1]}}
    assert Boolean.figures(Boolean.summary([few])) == {"x: most outside the ends": None}
    moved = record | {"distance": [0.5, 0.25], "same_top": [True, False], "top": [0.5, 0.7]}
    assert Scaling.figures(Scaling.summary([moved])) == {"x: most total variation": 0.5, "x: mean probability": 0.6}


def test_figures_of_the_memory():
    dial = {"factors": [0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0], "recall": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]}
    distance = {"mass": 0.9, "right_at_1": 1.0, "counterfactual": 0.3, "observed": 0.8, "observed_expected": 0.7}
    summary = {"distances": {0: distance, 1: distance | {"mass": 0.2}}, "dials": {"dial, counting": dial}}
    found = Memory.figures(summary)
    assert found["0 before: right at 1"] == 1 and found["0 before: observed"] == 0.8
    assert found["1 before: observed"] is None
    assert found["dial, counting 0.01"] == 0.1 and found["dial, counting 100"] == 0.7


@pytest.mark.usefixtures("without_pictures")
def test_two_runs_from_files(tmp_path, monkeypatch):
    """Models with different weights under one name: the table has the mean of their figures."""
    sentence = "The capital of France is"
    monkeypatch.setattr(transformations, "SENTENCES", {"France": sentence})
    tokenizer = questions_tokenizer([sentence])
    for seed in (0, 1):
        model = llama(tokenizer)
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
        model.save_pretrained(tmp_path / str(seed))
        tokenizer.save_pretrained(tmp_path / str(seed))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "0")) == len(tokenizer)
    results = probe("scaling", [f"m#{seed}={tmp_path / str(seed)}" for seed in (0, 1)], tmp_path / "out")
    most = [model["summary"]["sentences"]["France"]["most"] for model in results["models"]]
    found = results["runs"]["m"]["France: most total variation"]
    assert found["values"] == most and found["mean"] == pytest.approx(sum(most) / 2) and most[0] != most[1]
    written = json.loads((tmp_path / "out" / "probe_scaling.json").read_text())
    assert written["runs"] == results["runs"]
    assert PROBES["scaling"].tables(written)[-1].columns == ["figure", "m, 2 runs"]


@torch.no_grad()
@pytest.mark.usefixtures("without_pictures")
def test_the_probability_of_the_unchanged_sentences_likeliest_token(tmp_path, monkeypatch):
    sentence = "The capital of France is"
    monkeypatch.setattr(transformations, "SENTENCES", {"France": sentence})
    tokenizer = questions_tokenizer([sentence])
    model = llama(tokenizer)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    results = probe("scaling", [str(tmp_path / "m")], tmp_path / "out")
    ids_N = torch.tensor(tokenizer(sentence)["input_ids"])
    token = model(ids_N[None]).logits[0, -1].argmax()
    lm, (record,) = ContinuousLM(model), results["models"][0]["records"]
    expected = [lm.logits(Sentence(ids_N).scale(factor))[-1].softmax(-1)[token].item() for factor in record["factors"]]
    assert record["top"] == pytest.approx(expected, rel=1e-3) and not all(record["same_top"])
    mean = sum(expected) / len(expected)
    assert results["models"][0]["summary"]["sentences"]["France"]["top"] == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("kind", [Counting, Events, Memory])
def test_more_digits_can_be_peaks_than_there_are_repetitions(kind):
    figures = []
    for observed in (0.9, 1.0):
        counted = defaultdict(lambda: 0.9, records=3, valid=3, observed=observed)
        counted["distances"] = dict.fromkeys(DISTANCES, counted)
        counted["dials"] = {}
        figures.append(kind.figures(counted))
    found = over_runs({f"a#{run}": values for run, values in enumerate(figures)}, kind.above_one)["a"]
    assert set(kind.above_one) <= found.keys()
    beyond = {name for name, figure in found.items() if figure["high"] > 1}
    assert beyond == {name for name in found if name.endswith("observed")}
