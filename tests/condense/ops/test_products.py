"""Stacks of weights that lie side by side are one matrix; others are not taken for one."""

import pytest
import torch

from condense.ops.products import side_by_side, stacked_products

pytestmark = pytest.mark.unit


def weights(sizes=(3, 1, 2)):
    """[2, O, 4] of each size, in a memory [2, 8, 4] that has two further rows."""
    memory = torch.randn(2, sum(sizes) + 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return memory, list(memory[:, : sum(sizes)].split(sizes, dim=1))


def test_weights_side_by_side():
    memory, parts = weights()
    assert torch.equal(side_by_side(parts, dim=1), memory[:, :6])
    assert side_by_side(parts, dim=1).data_ptr() == memory.data_ptr()
    assert torch.equal(side_by_side(parts[1:], dim=1), memory[:, 3:6])
    gradients = torch.randn(2, 5, 6).split((4, 2), dim=2)
    assert torch.equal(side_by_side(gradients, dim=2), torch.cat(gradients, 2))
    assert torch.equal(side_by_side(parts[:1], dim=1), parts[0])


OTHERS = {
    "order": lambda parts: [parts[1], parts[0]],
    "a gap": lambda parts: [parts[0], parts[2]],
    "apart": lambda parts: [parts[0], parts[1].clone()],
    "width": lambda parts: [parts[0][:, :, :3], parts[1]],
    "dtype": lambda parts: [parts[0], parts[1].float()],
    "axes": lambda parts: [parts[0], parts[1].transpose(0, 1)],
    "number": lambda parts: [parts[0][:1], parts[1]],
}


@pytest.mark.parametrize("choose", OTHERS.values(), ids=OTHERS)
def test_others_are_not(choose):
    assert side_by_side(choose(weights()[1]), dim=1) is None


def test_rows_that_overlap_are_not():
    """Two matrices of one memory whose sum of rows is more than the distance of the matrices."""
    flat = torch.arange(64.0)
    first, second = (flat.as_strided((2, 3, 4), (16, 4, 1), offset) for offset in (0, 12))
    assert side_by_side([first, second], dim=1) is None


@pytest.mark.parametrize("joint", [True, False])
def test_products(joint):
    _, parts = weights()
    parts = parts if joint else [part.clone() for part in parts]
    input_mnI = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = [input_mnI @ part.transpose(1, 2) for part in parts]
    torch.testing.assert_close(list(stacked_products(input_mnI, parts)), expected, atol=1e-12, rtol=0)
