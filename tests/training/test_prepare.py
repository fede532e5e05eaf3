"""`condense prepare` before a run: the run then reads no document."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from condense.cli.main import app
from condense.training.data import preparation
from condense.training.data.tasks import make_examples
from condense.training.recipe import load_recipe
from condense.training.small_llama import save_small_llama
from condense.training.subprocesses import child_environment

from .recipes import write_recipe

pytestmark = pytest.mark.process


@pytest.fixture
def recipe(tmp_path):
    save_small_llama(tmp_path / "llama")
    for name in ("train-0", "train-1", "train-2", "news", "books"):
        lines = [json.dumps({"text": "the sea " * n, "summary": "red"}) for n in range(1, 24)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"task": "summarization", "sources": [{"files": f"{tmp_path}/train-*.jsonl"}]}
    data |= {"prepared": str(tmp_path / "prepared")}
    held_out = [{"files": f"{tmp_path}/{name}.jsonl"} for name in ("news", "books")]
    evaluation = {"sequences": 5, "sources": held_out}
    return write_recipe(tmp_path, f"{tmp_path}/llama", [(64, 10)], global_batch=4, data=data, evaluation=evaluation)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_run_finds_everything_prepared(recipe, tmp_path, monkeypatch):
    done = CliRunner().invoke(app, ["prepare", str(recipe), "--workers", "2"], catch_exceptions=False)
    assert done.exit_code == 0 and "40 kept" not in done.output and "documents read" in done.output
    by_workers = contents(tmp_path / "prepared")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    make_examples(load_recipe(recipe, [f"data.prepared={tmp_path}/alone"]), tokenizer)
    assert contents(tmp_path / "alone") == by_workers and len(by_workers) == 2 * 3
    # As the model that a run saves is read; and this run opens no source.
    tokenizer.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(preparation, "open_shards", lambda *_: pytest.fail("opened a source"))
    training, held_out = make_examples(load_recipe(recipe), AutoTokenizer.from_pretrained(tmp_path / "saved"))
    assert training.num_sequences(64) >= 40 and held_out.num_sequences(64) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_preparation_ends_its_workers_and_goes_on(recipe, tmp_path, number):
    for name in ("train-0", "train-1", "train-2"):  # seconds of work
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "the sea " * 5, "summary": "red"}) + "\n")
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write((json.dumps({"text": "the sea " * 1_500, "summary": "red"}) + "\n") * 1_500)
    command = [sys.executable, "-m", "condense", "prepare", str(recipe), "--workers", "2", "stages.0.steps=1000"]
    environment = child_environment()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any(file.stat().st_size for file in tmp_path.glob("prepared/*/unmerged/0-00001.chunks")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3  # the server and two workers
    process.send_signal(number)
    process.wait()
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert list(tmp_path.glob("prepared/*/unmerged/*.chunks"))
    subprocess.run(command, env=environment, check=True, capture_output=True)
    make_examples(
        load_recipe(recipe, [f"data.prepared={tmp_path}/alone", "stages.0.steps=1000"]),
        AutoTokenizer.from_pretrained(tmp_path / "llama"),
    )
    assert contents(tmp_path / "prepared") == contents(tmp_path / "alone")


def test_a_task_without_documents_has_nothing_to_prepare():
    done = CliRunner().invoke(app, ["prepare", "passkey_finetune_1b"], catch_exceptions=False)
    assert done.exit_code == 0 and "data.task=passkey" in done.output and "nothing to prepare" in done.output


@pytest.mark.parametrize("arguments", [["prepare"], ["train", "--dry-run"]])
def test_a_stage_that_has_not_run(arguments):
    with pytest.raises(ValueError, match=r"runs/summarize_pretrain_3b.*condense train summarize_pretrain_3b first"):
        CliRunner().invoke(app, [*arguments, "summarize_finetune_a"], catch_exceptions=False)
