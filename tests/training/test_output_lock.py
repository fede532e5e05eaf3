"""One run at a time in an output folder, for every way to start the second."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import threading
import time

import pytest

import condense.cli.main
from condense.eval.results_store import open_results_store
from condense.training.output_lock import check_unlocked, output_lock, was_finished

from .ranks import FORKS, run_ranks
from .runs import ROOT, train_alone

pytestmark = pytest.mark.process


def hold(folder, name, held):
    with output_lock(folder, name):
        held.set()
        time.sleep(120)


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """Starts processes that hold a folder. Others wait a moment for it, and not for seconds."""
    monkeypatch.setattr("condense.training.output_lock.PATIENCE_S", 0.2)
    started = []

    def start(name="run"):
        held = FORKS.Event()
        process = FORKS.Process(target=hold, args=(tmp_path / "out", name, held))
        process.start()
        started.append(process)
        assert held.wait(60)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def test_the_second_is_told_who_holds_it(holder, tmp_path):
    process = holder()
    with pytest.raises(ValueError, match=rf"out is in use by process {process.pid} on .* since 20\d\d-.*: wait"):
        check_unlocked(tmp_path / "out")
    with pytest.raises(ValueError, match=f"process {process.pid}"), output_lock(tmp_path / "out"):
        pytest.fail("held by two")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    check_unlocked(tmp_path / "out")
    assert not was_finished(tmp_path / "out")  # it was killed
    with output_lock(tmp_path / "out"):
        owner = json.loads((tmp_path / "out" / ".run.lock").read_text())
        assert owner["process"] == os.getpid()
        assert not was_finished(tmp_path / "out")
    assert was_finished(tmp_path / "out")
    with contextlib.suppress(KeyError), output_lock(tmp_path / "out"):
        raise KeyError
    assert not was_finished(tmp_path / "out")
    check_unlocked(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(number, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with output_lock(tmp_path):
        assert "can't be locked (no locks here): start nothing else" in capsys.readouterr().out
    assert was_finished(tmp_path)


def test_a_check_in_the_same_moment_does_not_refuse_the_run(tmp_path):
    """It holds the lock for as long as it takes to release it."""
    (tmp_path / ".run.lock").touch()
    descriptor = os.open(tmp_path / ".run.lock", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threading.Timer(0.5, os.close, [descriptor]).start()
    with output_lock(tmp_path):
        pass


def test_a_check_leaves_nothing(tmp_path):
    check_unlocked(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_measurements_of_one_kind_do_not_share_a_folder(holder, tmp_path):
    process = holder("passkey")
    with (
        pytest.raises(ValueError, match=f"process {process.pid}"),
        open_results_store(tmp_path / "out" / "passkey.records.jsonl", {}),
    ):
        pytest.fail("held by two")
    with open_results_store(tmp_path / "out" / "perplexity.records.jsonl", {}) as records:  # another kind may
        assert records.get({"a": 1}, lambda: {"value": 1}) == {"value": 1}


def test_a_second_run_is_refused_before_it_starts_ranks(holder, llama, tmp_path, monkeypatch, capsys):
    """Through the front door, which starts no process, and through training/train.py, in seconds; what the first has
    written stays as it is.
    """
    process = holder()
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    recipe = ROOT / "training" / "recipes" / "passkey_quickstart.yaml"
    options = [f"model={llama}", f"output={tmp_path / 'out'}", "model.segment_length=40"]
    capsys.readouterr()
    start = time.perf_counter()
    monkeypatch.setattr("sys.argv", ["condense", "train", str(recipe), *options])
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
        with pytest.raises(SystemExit) as refused:
            condense.cli.main.main()
    said = capsys.readouterr().err
    assert refused.value.code == 1 and f"in use by process {process.pid}" in said
    assert said.count("\n") == 1 and time.perf_counter() - start < 30
    succeeded, said = run_ranks(train_alone, ["--recipe", str(recipe), *options], ranks=1)
    assert not succeeded and f"in use by process {process.pid}" in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
