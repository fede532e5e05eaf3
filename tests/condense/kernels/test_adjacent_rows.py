"""The rows of a captured group lie so that the weight gradients of several segments are products without a copy."""

import pytest
import torch

from condense.execution import captured_groups, cuda_graph, static_sums
from condense.execution.adjacent_rows import Buffer, GroupRows
from condense.execution.cuda_graph import Graphs, Pool
from condense.kernels import cross_entropy, rms_norm, rotary, swiglu
from condense.kernels.derivatives import plain_gradients

from ..execution.graphed import trained, uses
from ..models import assert_same_gradients, gradients, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("poisoned")
SEGMENT, LENGTH = 5, 28  # five whole segments and a short one


def computed_again(compute, device, pool=None):
    """In place of a CUDA graph, whose outputs stay where they are."""
    outputs = compute()

    def replay():
        for kept, new in zip(outputs, compute(), strict=True):
            kept.data.copy_(new)

    return replay, outputs


@pytest.fixture(autouse=True)
def without_graphs(monkeypatch):
    graphs = Graphs(lambda device: Pool(None, None), lambda compute, device: compute(), computed_again)
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", graphs)


def plain_product_into(product_mnF, gate_xF, up_xF):
    product_mnF.copy_(swiglu.plain_silu_product(gate_xF, up_xF).view(product_mnF.shape))


def plain_gradients_into(both_mnF, gate_xF, up_xF, gradient_xF):
    found = plain_gradients(swiglu.plain_silu_product, (gate_xF, up_xF), (True, True), gradient_xF)
    both_mnF.copy_(torch.cat(found, -1).view(both_mnF.shape))


@pytest.fixture
def few_kernels(monkeypatch):
    """The interpreter is slow: only the kernel of the gated product, which writes the rows, runs in it."""
    for module in (cross_entropy, rms_norm, rotary):
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: False)


CASES = [(1, None, 2), (1, 2, 3), (1, 8, 3), (2, 8, 2), (1, 8, 100)]  # one runs the kernel itself


@pytest.mark.parametrize("is_wave", [False, True], ids=["in order", "in a wave"])
@pytest.mark.parametrize(("batch", "group", "waiting"), CASES)
@pytest.mark.usefixtures("few_kernels")
def test_gradients(batch, group, waiting, is_wave, noted, monkeypatch):
    monkeypatch.setattr(static_sums, "TOKENS", waiting * batch * SEGMENT)
    monkeypatch.setattr(captured_groups, "WAVE_TOKENS", 1000 if is_wave else 1)
    if (batch, group, waiting) != CASES[1]:
        monkeypatch.setattr("condense.kernels.triton_swiglu.silu_product_into", plain_product_into)
        monkeypatch.setattr("condense.kernels.triton_swiglu.silu_product_gradients_into", plain_gradients_into)
    ids = random_ids(batch, LENGTH)
    model = uses(trained(group, dtype=torch.float32), ids, times=1)
    joined = noted(static_sums, "_joined")
    found = gradients(model, ids)
    of_mlp = [
        result.data_ptr() != parts[0].data_ptr()
        for (parts,), _, result in joined
        if result.shape[1] == model.config.intermediate_size and len(parts) > 1
    ]
    assert of_mlp and any(of_mlp) == (batch > 1 and is_wave), "texts of a wave have no constant distance"
    monkeypatch.setattr(swiglu, "uses_kernels", lambda tensor: False)
    assert_same_gradients(found, gradients(tiny_model(torch.float32, schedule="sequential"), ids), 2e-5)


def test_parts_of_a_buffer_share_memory_and_no_version():
    buffer = Buffer(torch.zeros(2 * 3 + 4, 2, 5), distance=3)
    band, other = buffer.of_band(slice(1, 3), newest=2), buffer.of_band(slice(0, 1), newest=0)
    version = other._version
    band.fill_(1)
    expected = torch.zeros(10, 2, 5)
    expected[1 * 3 + 2] = expected[2 * 3 + 1] = 1
    assert torch.equal(buffer.rows_snF, expected)
    assert other._version == version


def test_a_group_holds_nothing_after_its_backward_pass():
    group = GroupRows(num_layers=2, num_segments=3, kept=2)
    rows = group.of_band(7, slice(0, 1))
    storage = rows.gradient(torch.zeros(1, 5, 4)).untyped_storage()._cdata
    assert group.of_band(7, slice(0, 2)).gradient(torch.zeros(2, 5, 4)).untyped_storage()._cdata == storage
    assert rows.output(torch.zeros(1, 5, 4)).untyped_storage()._cdata != storage
    group.clear()
    assert not group._buffers
