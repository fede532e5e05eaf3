"""Variants are compared side by side, even if one does not fit into memory."""

import time

import torch

from condense.eval.benchmark.cases import BenchmarkCase
from condense.eval.benchmark.models import build_model
from scripts.benchmarks.gpu.bars import judge
from scripts.benchmarks.gpu.comparison import Entry, compare
from scripts.benchmarks.gpu.session import Session
from scripts.benchmarks.gpu.sizes import REAL, REHEARSAL


def test_a_case_that_does_not_fit_is_a_point_and_the_others_are_timed(tmp_path):
    class NoMemory:
        description = "none"
        now = restart = peak = lambda self: 0

    def too_much():
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = build_model("stock", REHEARSAL, None, "sdpa")
    session = Session(REAL, torch.device("cpu"), torch.float32, time.monotonic() + 60, tmp_path, NoMemory())
    calls = []
    case = BenchmarkCase(kind="stock", mode="training", length=4096)
    entries = [Entry("training 4,096", case, model, call) for call in (too_much, lambda: calls.append(1))]
    compare(session, entries, repeats=3)
    points = session.points
    assert [point["out_of_memory"] for point in points] == [True, False]
    assert "seconds" not in points[0] and points[1]["repeats"] == 3 and len(calls) == 4
    assert "first_seconds" not in points[0] and points[1]["first_seconds"] > 0
    bars = {bar["what"]: bar for bar in judge(REAL, [points[0]])}
    assert bars["training step, Table I shape, flash, 4,096: stock / folded time"]["met"] == "OOM"
