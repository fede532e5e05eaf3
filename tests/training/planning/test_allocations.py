"""Counting on the meta device against sizes worked out by hand."""

import pytest
import torch

from condense.training.planning.allocations import CAPTURED, HOST, Allocations, on_device

pytestmark = pytest.mark.unit


def floats(number):
    return torch.empty(number, device="meta")


def test_storages_count_once_from_their_allocation_to_their_end():
    with Allocations("cuda") as allocations:
        first = floats(1000)  # 4,000 bytes, rounded to 4,096
        assert on_device(allocations.alive) == 4096
        view, second = first.view(10, 100)[3:], first + 1
        del first
        assert on_device(allocations.alive) == 2 * 4096  # the view keeps it
        del view, second
        assert on_device(allocations.alive) == 0 and on_device(allocations.most["forward"]) == 2 * 4096


def test_phases_and_moments_have_their_own_bytes():
    given = floats(256)
    allocations = Allocations("cuda")
    allocations.leave_out([given])
    with allocations:
        given.view(16, 16)
        activation = floats(256)
        with allocations.during("loss"):
            floats(512)
        allocations.begin("backward")
        allocations.phase = "backward"
        gradient = floats(384)
        del activation, gradient
    assert allocations.most["forward"] == {"activations": 1024, "loss": 2048}
    assert {name: size for name, size in allocations.most["backward"].items() if size} == {
        "activations": 1024, "backward": 1536
    }  # fmt: skip


def test_memory_of_graphs_only_grows_and_the_host_is_not_the_device():
    with Allocations("cuda") as allocations:
        for size in (256, 1024, 512):
            with allocations.during(CAPTURED):
                floats(size)
        with allocations.during(HOST):
            kept = floats(256)
        assert allocations.alive == {CAPTURED: 4096, HOST: 1024} and on_device(allocations.alive) == 4096
        del kept


def test_heap_blocks_leave_a_share_behind_and_large_ones_do_not():
    with Allocations("cpu", held_share=0.5) as allocations:
        small, large = floats(1024), floats(9 * 2**20)
        assert allocations.alive == {"activations": 4096 + 36 * 2**20, "heap": 2048}
        del small, large


def test_operations_may_need_more_than_their_result():
    allocations = Allocations("cuda")
    allocations.within[torch.ops.aten.neg.default] = lambda tensor: 3 * tensor.nbytes
    with allocations:
        given = floats(256)
        result = -given
        del given, result
    assert on_device(allocations.most["forward"]) == 2 * 1024 + 3 * 1024 and on_device(allocations.alive) == 0


def test_what_depends_on_numbers_is_taken_as_all():
    with Allocations("cuda"):
        hidden = torch.empty(2, 3, 4, device="meta")
        assert hidden[torch.empty(2, 3, dtype=torch.bool, device="meta")].shape == (6, 4)
        assert bool(torch.isfinite(hidden).all())
