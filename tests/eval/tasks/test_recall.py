"""Recall is counted on what the model itself decodes; the capacity is read off the counts."""

import csv
import json
import math
import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest

from condense.eval.models import EvaluatedModel
from condense.eval.report import write_report
from condense.eval.runner import measure
from condense.eval.statistics import wilson
from condense.eval.tasks import evaluate
from condense.eval.tasks.options import RecallOptions
from condense.eval.tasks.recall import Recall, _draw_capacities, capacity
from condense.training.data.recall import RECALL_TEXTS
from condense.training.small_llama import save_small_llama, word_tokenizer

from ..measuring import Writer, command, save_folded

TOKENIZER = word_tokenizer(RECALL_TEXTS)
LAST, ALL = slice(-1, None), slice(None)


class Reader(Writer):
    """Answers from a dictionary that it fills while it reads: with `kept` of the values of the key asked for."""

    config = SimpleNamespace()

    def __init__(self, kept):
        super().__init__(TOKENIZER)
        self.kept = kept

    @property
    def lengths(self):
        return [len(ids) + self.options["max_new_tokens"] for ids in self.asked]

    def answer(self, ids):
        text, known = TOKENIZER.decode(ids), {}
        for key, value in re.findall(r"The (\w+ \w+) has (\w+) \.", text):
            known.setdefault(key, []).append(value)
        return self.said(known[re.search(r"What does the (\w+ \w+) have", text)[1]])

    def said(self, values):
        return values[self.kept]


class Constant(Reader):
    """Says the same always, and counts how often that is right."""

    right = 0

    def said(self, values):
        self.right += values == ["salt"]
        return ["salt"]


class Forgetful(Reader):
    """Knows what the segments of the last 40 and, as far as it reaches, of the tokens before them say."""

    config = SimpleNamespace(segment_length=40, hidden_size=64, num_hidden_layers=2)

    def __init__(self, reach):
        super().__init__(LAST)
        self.reach = reach

    def answer(self, ids):
        words, known = TOKENIZER.convert_ids_to_tokens(ids), {}
        for at, word in enumerate(words[:-1]):
            if word == "has" and words[at + 2] == "." and at - 3 >= (len(words) - 1) // 40 * 40 - 40 * self.reach:
                known[" ".join(words[at - 2 : at])] = words[at + 1]
        asked = words.index("does") + 2
        return [known.get(" ".join(words[asked : asked + 2]), "The")]


def measured(model, **options):
    task = Recall(RecallOptions(models=[], **options), [EvaluatedModel("reader", "", model, TOKENIZER)])
    return task.summarise(measure(task))


@pytest.mark.parametrize(
    ("form", "kept", "accuracy"),
    [
        ("single", LAST, 1),
        ("overwritten", LAST, 1),
        ("overwritten", slice(0, 1), 0.75),  # a quarter of the keys has another value later
        ("multi_value", ALL, 1),
        ("multi_value", slice(None, None, -1), 0),  # in the wrong order
        ("multi_value", LAST, 0),  # not all
    ],
)
def test_a_model_that_reads_finds_all(form, kept, accuracy):
    reader = Reader(kept)
    options = {"num_prompts": 40, "overwritten": 0.25, "values": 2}
    results = measured(reader, pairs=(4, 12), lengths=(0, 200), forms=(form,), **options)
    cells = results["cells"]
    assert [(cell["pairs"], cell["length"]) for cell in cells] == [(4, 0), (12, 0), (4, 200), (12, 200)]
    for cell in cells:
        assert cell["form"] == form and cell["total"] == 40
        assert abs(cell["accuracy"] - accuracy) < (0.24 if accuracy == 0.75 else 1e-9)  # five standard deviations
        assert (cell["low"], cell["high"]) == wilson(cell["correct"], 40)
    assert [cell["num_tokens"] for cell in cells[2:]] == [200, 200]
    sentences = {"single": 12, "overwritten": 15, "multi_value": 24}[form]
    frame = {"single": 22, "overwritten": 24, "multi_value": 27}[form]
    assert cells[1]["num_tokens"] == frame + 6 * sentences
    assert sorted(set(reader.lengths)) == sorted({cell["num_tokens"] for cell in cells})
    assert {line["bound"] for line in results["capacities"]} == {">=" if accuracy == 1 else "<"}


@pytest.mark.parametrize("form", ["single", "overwritten"])
@pytest.mark.parametrize("reach", [0, 1, 2])
def test_answers_are_counted_by_the_segments_from_the_pair(reach, form):
    lengths = (81, 200, 481)  # prompts with a full last segment, with a part of one, and with a full one
    results = measured(Forgetful(reach), pairs=(2, 5), lengths=lengths, num_prompts=60, forms=(form,))
    lines = results["by_segments"]
    assert sum(line["total"] for line in lines) == 2 * 3 * 60
    found = {(line["nearest"], line["farthest"]) for line in lines if (line["pairs"], line["length"]) == (5, 481)}
    assert found == {(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16)}  # of 12 segments
    for line in lines:
        assert line["correct"] == (line["total"] if line["farthest"] <= reach else 0)


def test_a_model_that_says_a_constant_is_right_by_chance():
    model = Constant(LAST)
    (cell,) = measured(model, pairs=(3,), lengths=(60,), num_prompts=320)["cells"]
    assert cell["correct"] == model.right and abs(model.right - 320 / 32) < 9  # three standard deviations


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ({8: 1.0, 16: 0.95, 32: 0.75}, ("", 20)),  # 16 + 16 x 0.05 / 0.2
        ({16: 0.95, 32: 0.75, 8: 1.0}, ("", 20)),
        ({1: 1.0, 2: 0.9, 4: 0.5}, ("", 2)),
        ({1: 1.0, 2: 0.8, 4: 1.0}, ("", 1.5)),
        ({1: 0.9, 8: 0.9}, (">=", 8)),
        ({2: 0.89, 4: 1.0}, ("<", 2)),
    ],
)
def test_capacity(accuracy, expected):
    bound, pairs = capacity(accuracy)
    assert (bound, pairs) == (expected[0], pytest.approx(expected[1]))


def test_capacities_are_drawn_against_the_size_of_the_memory(tmp_path):
    sizes = {"a": [40, 64, 2], "b": [80, 64, 2], "c": [40, 64, 2], "xl": [80, 64, 2], "stock": None}
    found = {
        ("single", 200): [("a", "", 2.0), ("b", "", 4), ("c", "", 1), ("xl", "<", 1), ("stock", "", 3)],
        ("single", 300): [("a", "", 5.0), ("b", ">=", 4), ("c", "<", 1), ("xl", "", 7), ("stock", "", 3)],
        ("multi_value", 200): [("a", "", 9.0)],
    }
    results = {
        "models": [
            {"name": name, "segment_length": size and size[0],
             "memory_source": size and ("layer_input" if name == "xl" else "layer_output")}
            for name, size in sizes.items()
        ],
        "forms": ["single", "multi_value"], "lengths": [200, 300], "pairs": [1, 4], "memories": sizes,
        "cells": [
            {"model": name, "form": form, "length": length, "pairs": pairs, "accuracy": 0.5}
            for name in sizes for form in ("single", "multi_value") for length in (200, 300) for pairs in (1, 4)
        ],
        "capacities": [
            {"model": name, "form": form, "length": length, "bound": bound, "pairs": pairs}
            for (form, length), lines in found.items() for name, bound, pairs in lines
        ],
    }  # fmt: skip
    axes = plt.figure().subplots()
    _draw_capacities(axes, results, "single", [[40, 64, 2], [80, 64, 2]])
    lines = {line.get_label(): line for line in axes.lines if line.get_marker() == "None"}
    mean = lines["200 tokens, layer_output"]
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([0, 1], [1.5, 4])
    assert math.isnan(lines["200 tokens, layer_input"].get_ydata()[0])  # a bound is not a value
    assert all(map(math.isnan, lines["300 tokens, layer_output"].get_ydata()))
    points = [(*line.get_xdata(), *line.get_ydata(), line.get_marker(), line.get_color()) for line in axes.lines
              if line.get_marker() != "None" and len(line.get_xdata())]  # fmt: skip
    assert sorted(points) == sorted(
        [(0, 2, "o", "C0"), (1, 4, "o", "C0"), (0, 1, "o", "C0"), (1, 1, "v", "C0"),
         (0, 5, "o", "C1"), (1, 4, "^", "C1"), (0, 1, "v", "C1"), (1, 7, "o", "C1")]
    )  # fmt: skip
    assert [label.get_text() for label in axes.get_xticklabels()] == ["40 x 64 x 2\n= 5,120", "80 x 64 x 2\n= 10,240"]
    plt.close(axes.figure)
    Recall.draw(results, tmp_path / "recall")
    assert (tmp_path / "recall-capacity.png").stat().st_size > 5_000


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns `--model` of a folded and a stock model with the same weights."""
    folder = tmp_path_factory.mktemp("models")
    save_small_llama(folder / "stock", task="recall")
    save_folded(folder / "stock", folder / "folded", 40)
    return [f"{name}={folder / name}" for name in ("folded", "stock")]


def test_command_on_folded_and_stock_models(models, tmp_path):
    arguments = ["--lengths", "0,160", "--pairs", "1,5", "--form", "single,multi_value", "--prompts", "3"]
    arguments += [word for model in models for word in ("--model", model)]
    shown = command("eval", "recall", *arguments, "--output", tmp_path / "recall")
    results = json.loads((tmp_path / "recall" / "recall.json").read_text())
    assert len(results["cells"]) == 2 * 2 * 2 * 2 and len(results["capacities"]) == 2 * 2 * 2
    rows = list(csv.DictReader((tmp_path / "recall" / "recall.csv").open()))
    assert [int(row["correct"]) for row in rows] == [cell["correct"] for cell in results["cells"]]
    assert all((tmp_path / "recall" / f"recall.{ending}").stat().st_size > 5_000 for ending in ("png", "svg"))
    assert not list((tmp_path / "recall").glob("recall-capacity*"))  # one size of memory
    assert results["memories"] == {"folded": [40, 64, 2], "stock": None}
    assert "40 x 64 x 2 = 5,120" in shown and "stock, multi_value: % correct" in shown
    assert "folded, single: % correct (95 % interval) by segments from the pair" in shown
    assert "stock, single: % correct (95 % interval) by segments from the pair" not in shown
    state = {(line["model"], line["length"]): line["state_bytes"] for line in results["capacities"]}
    # Each layer has keys and values of memory, segment and next memory; the stock model has those of all tokens.
    assert state["folded", 0] == state["folded", 160] == pytest.approx(2 * 3 * 2 * 40 * 64 * 4, rel=0.01)
    assert state["stock", 160] == 2 * 2 * (160 - 1) * 64 * 4 > state["stock", 0]
    assert "recall" in write_report(tmp_path).read_text()


def test_a_measurement_takes_more_forms(models, tmp_path, monkeypatch, noted):
    monkeypatch.setattr(Recall, "draw", lambda *given: None)
    options = {"models": models[:1], "lengths": [80, 120], "pairs": [1, 3], "num_prompts": 2}
    before = evaluate("recall", tmp_path, **options)
    done = noted(Recall, "measure")
    more = evaluate("recall", tmp_path, **options | {"forms": ["single", "overwritten"]})
    assert more["cells"][:4] == before["cells"] and len(done) == 4


def test_cells_do_not_depend_on_the_batches(monkeypatch):
    """Prompts are drawn one after another, however many are answered at once."""
    options = {"pairs": (6,), "lengths": (100,), "forms": ("overwritten",), "num_prompts": 40}
    (whole,) = measured(first := Reader(slice(0, 1)), **options)["cells"]
    monkeypatch.setattr("condense.eval.models.TOKENS_PER_BATCH", 700)
    assert measured(Reader(slice(0, 1)), **options)["cells"] == [whole] and 0 < whole["correct"] < 40
    assert len(first.lengths) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": (1, 32), "lengths": (1024, 200)}, "--lengths 200, in tokens of .* pairs=32 .* need 214"),
        ({"pairs": (600,)}, "pairs=600: pass 1 to 576"),
        ({"forms": ("two",)}, "unknown form 'two': choose from single, multi_value, overwritten"),
        ({"pairs": (2, 2)}, "twice"),
        ({"overwritten": 1.5}, "a share of 1.5: pass 0 to 1"),
        ({"values": 40, "forms": ("multi_value",)}, "values=40: pass 1 to 32"),
    ],
)
def test_mistakes_are_named(options, message):
    reader = Reader(LAST)
    with pytest.raises(ValueError, match=message):
        measured(reader, **options)
    assert not reader.asked  # before anything runs
