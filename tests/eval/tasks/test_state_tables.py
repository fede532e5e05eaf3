"""Tables that hold the size of a state say in which number format: a model in bfloat16 has half the bytes."""

import pytest

from condense.eval.results import run_metadata
from condense.eval.tasks.answers import Answers
from condense.eval.tasks.facts import Facts
from condense.eval.tasks.passkey import Passkey
from condense.eval.tasks.recall import Recall

pytestmark = pytest.mark.unit

DTYPES = {"whole": "float32", "half": "bfloat16", "old": None}  # the first versions stored none
SHARE = {"correct": 3, "total": 4, "accuracy": 0.75, "low": 0.3, "high": 0.95}
STATES = {"whole": 240 * 1024, "half": 120 * 1024, "old": 1024}


def results_of(cells, **fields):
    models = [{"name": name, **({} if dtype is None else {"dtype": dtype})} for name, dtype in DTYPES.items()]
    return run_metadata() | {"models": models, "lengths": [80], "cells": cells, **fields}


def cells(**fields):
    return [{"model": name, "length": 80, **SHARE, "state_bytes": STATES[name], **fields} for name in DTYPES]


def columns(table, model):
    (row,) = (row for row in table.rows if row[0] == model)
    return dict(zip(table.columns, row, strict=True))


def test_answers():
    found = results_of(cells(longest_prompt=80), data=["mine.jsonl"], match="contains", left_out={})
    (table,) = Answers.tables(found)
    rows = {name: columns(table, name) for name in DTYPES}
    assert {name: (row["state [KiB]"], row["dtype"]) for name, row in rows.items()} == {
        "whole": ("240.0", "float32"), "half": ("120.0", "bfloat16"), "old": ("1.0", "-"),
    }  # fmt: skip


def test_recall():
    memories = dict.fromkeys(DTYPES)
    lines = [{"model": name, "form": "last", "length": 80, "pairs": 2, "bound": "", "state_bytes": STATES[name]}
             for name in DTYPES]  # fmt: skip
    found = results_of(cells(form="last", pairs=2), capacities=lines, memories=memories, forms=["last"], pairs=[2])
    table, *_ = Recall.tables(found)
    assert [columns(table, name)["dtype"] for name in DTYPES] == ["float32", "bfloat16", "-"]


def test_passkey():
    (table,) = Passkey.tables(results_of(cells(depth=0.0), depths=[0.0]))
    assert [name for name in table.columns if "state" in name] == [
        "state [KiB, float32]", "state [KiB, bfloat16]", "state [KiB]",
    ]  # fmt: skip


def test_facts():
    found = Facts.tables(results_of(cells(kind="where"), kinds=["where"], guesses={"where": 0.5}))
    names = [row[0] for table in found for row in table.rows if str(row[0]).startswith("state")]
    assert names == ["state [KiB, float32]", "state [KiB, bfloat16]", "state [KiB]"]


def test_the_picture_names_the_formats(tmp_path, monkeypatch):
    """In the legend where they differ, and at the axis."""
    drawn = []
    monkeypatch.setattr("condense.eval.results._save", lambda figure, _: drawn.append(figure))
    found = results_of([*cells(depth=0.0), *({**cell, "length": 160} for cell in cells(depth=0.0))], depths=[0.0])
    found |= {"lengths": [80, 160], "longest_trained": dict.fromkeys(DTYPES)}
    Passkey.draw(found, tmp_path / "passkey")
    state = drawn[0].axes[1]
    assert state.get_ylabel() == "state of a text [KiB, float32, bfloat16]"
    assert [line.get_label() for line in state.lines] == ["whole, float32", "half, bfloat16", "old"]
