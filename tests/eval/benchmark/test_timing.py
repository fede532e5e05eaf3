"""Contenders take turns, and each call has its own seconds and peak."""

import pytest
import torch

from condense.eval.benchmark.timing import Contender, attempt, measure_in_turn, summarize

pytestmark = pytest.mark.unit


class CountingMemory:
    """A peak that is the number of restarts."""

    description = "none"

    def __init__(self):
        self.restarts = 0

    def now(self):
        return 0

    def restart(self):
        self.restarts += 1

    def peak(self):
        return self.restarts


def refuse():
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_contenders_take_turns_and_one_that_does_not_fit_has_no_samples():
    calls: list[str] = []
    model = torch.nn.Linear(1, 1)
    model.device = torch.device("cpu")

    def contender(name):
        return Contender(model, lambda: calls.append(name), lambda: calls.append(f"prepare {name}"))

    contenders = [contender("a"), Contender(model, refuse, lambda: None), contender("b")]
    taken = measure_in_turn(contenders, CountingMemory(), repeats=2)
    assert calls == ["prepare a", "a", "prepare b", "b"] * 3  # a warm-up and two repeats
    assert [[sample.peak_bytes for sample in samples] for samples in taken] == [[4, 6], [], [5, 7]]
    assert all(sample.seconds >= 0 for sample in taken[0])
    once = measure_in_turn(contenders, CountingMemory(), repeats=5, has_time=lambda seconds: False)
    assert [len(samples) for samples in once] == [1, 0, 1]


def test_errors_other_than_memory_are_raised():
    assert attempt(refuse) is None
    with pytest.raises(RuntimeError, match="shapes differ"):
        attempt(lambda: exec("raise RuntimeError('shapes differ')"))


def test_a_summary_has_median_and_range():
    expected = {"seconds": 2.0, "seconds_low": 1.0, "seconds_high": 5.0, "repeats": 3}
    assert summarize([5.0, 1.0, 2.0]) == expected
