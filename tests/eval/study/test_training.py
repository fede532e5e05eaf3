"""Folders that several processes need are made once, and whole or not at all; a model is trained once."""

import io
import sys
import threading
import time

import pytest

from condense.eval.study import training
from condense.eval.study.training import make_once, train_alone
from condense.training.output_lock import output_lock
from condense.training.recipe import load_recipe

pytestmark = pytest.mark.unit


def test_a_folder_is_written_once(tmp_path):
    calls = []

    def write(folder):
        calls.append(folder)
        (folder / "file").write_text("made")

    for _ in range(2):
        assert make_once(tmp_path / "inputs" / "one", write) == tmp_path / "inputs" / "one"
    assert len(calls) == 1 and (tmp_path / "inputs" / "one" / "file").read_text() == "made"


def test_a_writer_that_fails_leaves_no_folder_and_what_a_killed_one_left_goes(tmp_path):
    (tmp_path / ".one.123.partial").mkdir()

    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        make_once(tmp_path / "one", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".one.lock"]


def test_a_second_one_waits_for_the_first(tmp_path, monkeypatch):
    begun, go_on, calls = threading.Event(), threading.Event(), []
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())  # pytest's capture can lose what a thread writes

    def write(folder):
        calls.append(folder)
        begun.set()
        assert go_on.wait(60)
        (folder / "file").write_text("made")

    threads = [threading.Thread(target=make_once, args=(tmp_path / "one", write)) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    deadline = time.monotonic() + 30
    while "waiting for the process that makes" not in said.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1 and (tmp_path / "one" / "file").exists()


def test_a_run_that_has_finished_is_not_repeated_without_its_checkpoints(tmp_path, monkeypatch):
    """A study may be stopped after it has removed them, and before it has stored what it measured."""
    trained = []

    def train(recipe):
        trained.append(recipe.seed)
        with output_lock(recipe.output):
            (recipe.output / "recipe.json").write_text(recipe.model_dump_json(indent=2), encoding="utf-8")

    monkeypatch.setattr(training, "train", train)
    for seed in (1, 1, 2):
        train_alone(load_recipe("passkey_quickstart", [f"output={tmp_path}", f"seed={seed}"]))
    assert trained == [1, 2]
