"""Helpers of the tests of studies, whose models are trained by the real trainer."""

import json

import pytest

from condense.eval.runner import run


def run_study(task, output):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", "unused")  # and unset afterwards
        return run(task, output)


def stored_tables(task, output):
    """Returns the tables of the stored results, after a look at the files."""
    for ending in ("json", "csv", "png", "svg"):
        assert (output / f"{task.kind}.{ending}").stat().st_size > 100
    tables = task.tables(json.loads((output / f"{task.kind}.json").read_text()))
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    return tables
