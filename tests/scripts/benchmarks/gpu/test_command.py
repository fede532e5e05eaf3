"""The GPU benchmark at tiny sizes: every part runs, the last table has measured ratios, and a wrong model is found."""

import csv
import gc
import json
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from condense.attention import AttentionMask
from condense.execution import captured_groups as groups_module
from scripts.benchmarks.gpu import correctness
from scripts.benchmarks.gpu.command import PARTS, ROOT, main
from scripts.benchmarks.gpu.correctness import captured_groups
from scripts.benchmarks.gpu.longest import longest
from scripts.benchmarks.gpu.parts import raced, training_large
from scripts.benchmarks.gpu.schedule_ratios import schedule_ratios
from scripts.benchmarks.gpu.session import OutOfTimeError, new_session
from scripts.benchmarks.gpu.sizes import SMOKE

from ....condense.execution.recording import recorded_graphs

pytestmark = pytest.mark.process

EXTRAS = ("accelerate", "datasets", "deepspeed", "jinja2", "matplotlib", "psutil", "pyarrow", "pydantic", "rouge_score")
# On a CPU torch traces FlexAttention for each new mask, which takes seconds, and then runs the same code.
UNTRACED = "from torch.nn.attention import flex_attention; flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True"
MEASURED = ("training", "training_large", "products", "steps", "prefill", "decoding", "schedules", "longest")


def benchmark(output: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess:
    """Runs the command; `before` runs first in its process."""
    code = f"{before}\nimport sys\nfrom scripts.benchmarks.gpu.command import main\nsys.exit(main(sys.argv[1:]))"
    start = ["-c", code] if before else ["-m", "scripts.benchmarks.gpu"]
    command = [sys.executable, *start, "--smoke", "--output", str(output), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """Runs the command without the packages of the extras: it needs only torch and transformers."""
    folder = tmp_path_factory.mktemp("gpu")
    run = benchmark(folder, before=f"import sys; sys.modules |= dict.fromkeys({EXTRAS})\n{UNTRACED}")
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == (folder / "gpu.txt").read_text().strip()
    return folder


@pytest.fixture(scope="module")
def results(rehearsal) -> dict:
    return read(rehearsal)


def read(folder: Path) -> dict:
    return json.loads((folder / "gpu.json").read_text())


def test_every_part_runs_and_is_written(rehearsal, results, capsys):
    assert main(["--list"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.split("\n") if line} - {"tests"}
    assert {name: part["status"] for name, part in results["parts"].items()} == dict.fromkeys(names, "done")
    assert {point["part"] for point in results["points"]} == set(MEASURED)
    checked = {"correctness", "kernels", "loss", "captured_groups", "products", "graph", "flex"}
    assert {check["part"] for check in results["checks"]} == checked
    assert results["smoke"] and "rehearsal" in (rehearsal / "gpu.txt").read_text()
    assert {"torch", "transformers"} <= results["versions"].keys() and results["hardware"]
    assert sorted(path.name for path in rehearsal.iterdir()) == ["gpu.csv", "gpu.json", "gpu.txt"]
    with (rehearsal / "gpu.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results["points"])


def test_correctness_asks_for_every_attention_schedule_and_text(results):
    names = [check["name"] for check in results["checks"] if check["passed"]]
    for attention in ("eager", "sdpa", "flex_attention"):
        for schedule in results["schedules"]:
            for dtype in ("float32", "bfloat16"):
                case = f"tiny, {attention}, {schedule}, {dtype}"
                # FlexAttention has no backward pass on a CPU.
                has_gradients = attention != "flex_attention" or results["device"] != "cpu"
                for text in ("whole segments", "part of a segment left", "durations", "padded", "padded, durations"):
                    assert f"{case}, {text}: logits" in names
                    assert (f"{case}, {text}: gradients" in names) == has_gradients
                assert f"{case}: token by token" in names


def test_decoding_is_compared_with_and_without_a_graph(results):
    checks = {check["name"]: check["passed"] for check in results["checks"] if check["part"] == "graph"}
    assert len(checks) == 8 and all(checks.values())
    for batch, most in ((1, 256), (2, 64)):
        for row, fixed in ((f"decoding, batch {batch}", False), (f"decoding, graph, batch {batch}", True)):
            points = [point for point in results["points"] if point["row"] == row and point["kind"] == "folded"]
            assert [point["length"] for point in points] == [32, most]
            assert {point["fixed_decoding"] for point in points} == {fixed}


def test_the_ratios_are_those_of_the_points(results):
    points, found = results["points"], {bar["what"]: bar for bar in results["bars"]}
    assert len(found) == len(results["bars"]) == 15

    def best(row, kind, figure="seconds", **fields):
        fitting = [p for p in points if p["row"] == row and p["kind"] == kind and fields.items() <= p.items()]
        assert fitting
        return (max if figure == "longest" else min)(point[figure] for point in fitting)

    def expect(begin, ratio):
        (bar,) = [bar for name, bar in found.items() if name.startswith(begin)]
        assert bar["measured"] == pytest.approx(ratio, rel=1e-12)
        at_most = "over" in begin
        met = [(ratio <= goal) if at_most else (ratio >= goal) for goal in (bar["bar"], bar["stretch"])]
        if "longest" not in begin:
            assert bar["met"] == ("stretch" if met[1] else "yes" if met[0] else "no")

    for words, row in ((": ", ""), (", checkpointing on both sides: ", ", checkpointing")):
        for length in (64, 32):
            name = f"training {length}{row}"
            ratio = best(name, "stock") / best(name, "folded")
            expect(f"training step, Table I shape, flash, {length}{words}", ratio)
        for name, size in (("training memory, eager", "eager, 64"), ("training memory", "flash, 96")):
            ratio = best(name + row, "stock", "peak_bytes") / best(name + row, "folded", "peak_bytes")
            expect(f"training memory, Table I shape, {size}{words}", ratio)
    orders = [best("prefill", "folded", schedule=name) for name in ("sequential", "wavefront")]
    expect("prefill, 1.2 B shape, segment", orders[0] / orders[1])
    expect("prefill, 1.2 B shape, 160", best("prefill, full", "stock") / best("prefill, full", "folded"))
    for batch, length in ((1, 256), (2, 64)):
        for row, words in (("decoding", ""), ("decoding, graph", "by a graph, ")):
            both = [best(f"{row}, batch {batch}", "folded", length=tokens) for tokens in (length, 32)]
            expect(f"decoding, {words}1.2 B shape, batch {batch}: a token at {length} over", both[0] / both[1])
    limits = [best("longest training text", kind, "longest") for kind in ("folded", "stock")]
    expect("longest training text", limits[0] / limits[1])
    # No text was too long for this machine, so the ratio of limits is unknown.
    assert found["longest training text, 1.2 B shape, checkpointing on both sides: folded / stock"]["met"] == "unknown"


def test_a_wrong_model_stops_the_run(tmp_path, monkeypatch, capsys):
    """One query of each segment sees one key too many."""
    right = AttentionMask.boolean

    def wrong(self, num_queries, num_keys, device):
        mask = right(self, num_queries, num_keys, device)
        if num_queries > 1:
            mask[..., -2, -1] = True
        return mask

    monkeypatch.setattr(AttentionMask, "boolean", wrong)
    # Memory is not measured: `ResidentMemory` would limit the memory of the tests' process.
    monkeypatch.setattr("scripts.benchmarks.gpu.session.memory_of", lambda device: SimpleNamespace(description="none"))
    try:
        assert main(["--smoke", "--output", str(tmp_path), "--only", "correctness,prefill"]) == 1
    finally:
        gc.unfreeze()  # what the command froze
    parts = read(tmp_path)["parts"]
    assert parts["correctness"]["status"] == "failed" and "sdpa" in parts["correctness"]["reason"]
    assert parts["prefill"]["status"] == "skipped" and "correctness failed" in parts["prefill"]["reason"]
    assert "correctness: failed: " in capsys.readouterr().out
    assert not read(tmp_path)["points"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.txt"]  # no points, no CSV


@pytest.mark.parametrize("num_dtypes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_segments_from_a_recorded_graph(num_dtypes, monkeypatch, tmp_path):
    """As on CUDA: right graphs take part in the race; a wrong graph is found and does not."""
    counts = recorded_graphs(monkeypatch)
    if num_dtypes == 1:
        monkeypatch.delitem(correctness.LIMITS, torch.bfloat16)  # slow on a CPU
    session = new_session(SMOKE, time.monotonic() + 600, tmp_path)
    session.part = "captured_groups"
    captured_groups(session)
    assert [check["passed"] for check in session.checks] == [True] * num_dtypes * 2 * 3 * (2 * 3 + 1) and counts[
        "replay"
    ]
    raced_now = [(one.segment_length, one.schedule) for one in raced(session, [16, 32])]
    assert raced_now[-2:] == [(16, "graph"), (32, "graph")] and len(raced_now) == 6
    assert len(raced(session, [16, 32], graph=False)) == len(raced(session, [16, 32], "flash_attention_2")) == 4

    training_large(session)
    longest(session)
    graphs = [point for point in session.points if point["schedule"] == "graph"]
    assert [point["row"] for point in graphs] == ["training, large, 64, checkpointing", "longest training text"]
    assert graphs[0]["checkpointing"] and "peak_bytes" not in graphs[0] and graphs[1]["longest"] == 128

    forward = groups_module.CapturedGroup.forward
    wrong = lambda group, given: forward(group, (*given[:6], given[6] * 1.2, *given[7:]))  # noqa: E731
    monkeypatch.setattr(groups_module.CapturedGroup, "forward", wrong)
    if num_dtypes == 2:
        monkeypatch.delitem(correctness.LIMITS, torch.bfloat16)  # one dtype shows it
    captured_groups(session)
    assert not all(check["passed"] for check in session.checks)
    assert len(raced(session, [16, 32])) == 4


@pytest.mark.slow
def test_parts_by_name_and_by_time(tmp_path, capsys):
    run = benchmark(tmp_path, "--only", "schedules,flex", "--minutes", "0.6")
    assert run.returncode == 0, run.stderr[-3000:]
    parts = read(tmp_path)["parts"]
    assert list(parts) == ["schedules", "flex"]
    assert parts["schedules"]["status"] == "skipped" and "needs 40 s" in parts["schedules"]["reason"]
    assert parts["flex"]["status"] == "done"
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "speed"])
    assert "choose from correctness" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["gpu", "gpu/longest", "gpu/h100"])
def test_stored_results_are_judged_again(folder, tmp_path, capsys):
    """The stored tables fit the present bars and the present rule of schedule="auto"."""
    stored = ROOT / "docs" / "results" / folder
    shutil.copy(stored / "gpu.json", tmp_path)
    assert main(["--judge", str(tmp_path)]) == 0
    for name in ("gpu.txt", "gpu.json"):
        assert (tmp_path / name).read_text() == (stored / name).read_text()
    assert capsys.readouterr().out == (stored / "gpu.txt").read_text()
    assert (tmp_path / "schedules.png").exists() == (folder == "gpu")


def test_the_choice_of_auto_is_judged_by_the_points():
    def point(length, schedule, seconds):
        shape = {"layers": 4, "segment_length": 512, "batch": 1, "length": length}
        return shape | {"row": f"schedules, {length}", "schedule": schedule, "seconds": seconds}

    points = [point(length, *timed) for length in (1024, 4096) for timed in (("sequential", 0.5), ("wavefront", 0.4))]
    table = schedule_ratios([*points, point(4096, "graph", 0.1)])
    assert "1 of 2 points" in table.title
    assert [row[-2:] for row in table.rows] == [["sequential", "1.25!"], ["wavefront", "1.00 "]]
    assert [row[4:6] for row in table.rows] == [["1.25", ""], ["1.25", "5.00"]]


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    assert main(["--judge", str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err
    assert "nothing" in said and "pass a folder that scripts/gpu_bench wrote" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["failed", "out of time"])
def test_outcomes_of_the_tests_are_kept(end, tmp_path, monkeypatch):
    """Names are written while the tests run, so a stopped run still names the failed tests."""

    def pytest_run(command, cwd, stdout, timeout):
        stdout.write("tests/condense/state/test_cache.py::test_a FAILED\n")
        assert command[1:3] == ["-m", "pytest"] and 0 < timeout <= 60
        if end == "out of time":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr("scripts.benchmarks.gpu.command.subprocess.run", pytest_run)
    session = new_session(SMOKE, time.monotonic() + 60, tmp_path)
    ends_early = pytest.raises(OutOfTimeError, match="tests.txt has their outcomes")
    with ends_early if end == "out of time" else nullcontext():
        PARTS["tests"].run(session)
    assert [check["passed"] for check in session.checks] == ([] if end == "out of time" else [False])
    assert "test_a FAILED" in (tmp_path / "tests.txt").read_text()
