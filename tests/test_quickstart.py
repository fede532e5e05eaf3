"""The whole main job, cut short: killed in the middle of its training and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from condense import CondenseConfig
from condense.training.small_llama import save_small_llama
from scripts.quickstart import MEMORIES, fold

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["curriculum.steps=200", "optimizer.decay_steps=10", "curriculum.last_segments=3", "checkpoints.every=50"]


def command(output, *arguments):
    return [sys.executable, "scripts/quickstart.py", "--output", str(output), *arguments, *SHORT]


def test_it_trains_the_papers_memory_beside_transformer_xls(tmp_path):
    save_small_llama(tmp_path / "llama", width=16)
    for name, source in MEMORIES.items():
        fold(tmp_path / "llama", tmp_path / name, source)
    configs = [CondenseConfig.from_pretrained(tmp_path / name) for name in ("folded", "transformer-xl")]
    assert [set(config.memory_shares) for config in configs] == [{1.0}, {0.0}]
    assert [config.sink_token_id for config in configs] == [None, None]


@pytest.mark.slow
def test_a_killed_quickstart_resumes(tmp_path):
    process = subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    trained = tmp_path / "folded" / "trained"
    deadline = time.monotonic() + 300
    while not (trained / "checkpoint-100" / "complete.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (trained / "model.safetensors").exists()

    other = subprocess.run(command(tmp_path, "--seed", "1"), cwd=ROOT, capture_output=True, text=True)
    assert other.returncode == 1
    assert "belongs to a run with {'seed': 0" in other.stderr and "Traceback" not in other.stderr

    again = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "[fold it (folded)] done before" in again.stdout and "resuming from" in again.stdout
    for name in ("folded", "transformer-xl"):
        lines = [json.loads(line) for line in (tmp_path / name / "trained" / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(10, 201, 10))
    results = json.loads((tmp_path / "passkey" / "passkey.json").read_text())
    assert {(cell["model"], cell["length"]) for cell in results["cells"]} == {
        (name, length) for name in ("folded", "transformer-xl") for length in (80, 120, 480, 1920)
    }
    million = json.loads((tmp_path / "million-tokens" / "passkey.json").read_text())
    assert {(cell["model"], cell["length"], cell["total"]) for cell in million["cells"]} == {("folded", 2**20, 3)}
    page = (tmp_path / "report.html").read_text()
    assert "million-tokens" in page and "1,048,576" in page
    assert all(f"<th>{name}: % correct" in page for name in ("folded", "transformer-xl"))
    assert str(tmp_path / "report.html") in again.stdout
