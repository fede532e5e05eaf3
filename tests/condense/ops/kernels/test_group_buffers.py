"""The rows of a captured group lie so that the weight gradients of several segments are products without a copy."""

import gc
import weakref
from collections import defaultdict

import pytest
import torch

from condense.execution import captured_groups, cuda_graph, group_buffers, stacked_parameters
from condense.execution.cuda_graph import Graphs, Pool
from condense.execution.group_buffers import Buffer, GroupBuffers

from ...execution.graphed import trained, uses
from ...models import MEMORIES, assert_same_gradients, gradients, random_ids, tiny_model
from .plain_launches import MODULES, replace_launches

pytestmark = pytest.mark.usefixtures("poisoned")
SEGMENT, LENGTH = 5, 48  # nine whole segments and a short one


def computed_again(compute, device, pool=None):
    """In place of a CUDA graph, whose outputs stay where they are, and of which autograd knows nothing."""
    outputs = tuple(output.detach() for output in compute())

    def replay():
        for kept, new in zip(outputs, compute(), strict=True):
            kept.data.copy_(new)

    return replay, outputs


@pytest.fixture(autouse=True)
def without_graphs(monkeypatch):
    graphs = Graphs(lambda device: Pool(None, None), lambda compute, device: compute(), computed_again)
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", graphs)
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))


CASES = [(1, None, 2), (1, 8, 3), (2, 8, 2)]  # texts, segments of a checkpoint, WAITING_TOKENS
FIELDS = {
    "output": {},
    "bias": {"attention_bias": True},
    "share": MEMORIES["share"],
    "detached": {"bptt_segments": 2},
    "input": MEMORIES["input"],
    "input, detached": MEMORIES["input"] | {"bptt_segments": 2},
    "shares, detached": MEMORIES["shares"] | {"bptt_segments": 4},
    "sink": MEMORIES["sink"],
    "sink, shares, detached": MEMORIES["sink, shares"] | {"bptt_segments": 2},
}


@pytest.fixture
def copied(monkeypatch):
    """Which sides of each product for weight gradients were copied, by the widths of its input and outputs: the input,
    or the gradients."""
    found, joined = defaultdict(set), []
    plain, add_waiting = group_buffers._join, GroupBuffers._add_waiting

    def join(parts):
        joint = plain(parts)
        joined.append(joint.data_ptr() != parts[0].data_ptr())
        return joint

    def add(buffers, layer, *names):
        joined.clear()
        add_waiting(buffers, layer, *names)
        weights = [buffers.sums[name].weights[0] for name in names]
        found[weights[0].shape[1], *map(len, weights)] |= {
            "gradients" if number else "input" for number, was_copied in enumerate(joined) if was_copied
        }

    monkeypatch.setattr(group_buffers, "_join", join)
    monkeypatch.setattr(GroupBuffers, "_add_waiting", add)
    return found


@pytest.fixture
def without_kernels(monkeypatch):
    def switch_off():
        for module in MODULES:
            monkeypatch.setattr(module, "uses_kernels", lambda tensor: False)

    return switch_off


@pytest.mark.parametrize("is_wave", [False, True], ids=["in order", "in a wave"])
@pytest.mark.parametrize(
    ("batch", "group", "waiting", "fields"),
    [
        *(pytest.param(*case, fields, id=f"{case}, {name}") for case in CASES for name, fields in FIELDS.items()),
        pytest.param(1, 2, 3, {}, id="groups of two"),
        pytest.param(1, 8, 100, {}, id="all wait"),
    ],
)
def test_gradients(batch, group, waiting, fields, is_wave, copied, without_kernels, monkeypatch):
    """The output of attention is copied, and gradients of a layer's end that has no norm beside it: with a share, or
    with a detached memory. All others lie where a product reads them, unless some layers remember their input: then
    the gradients of the memory's keys and values are copied, if there are any."""
    replace_launches(monkeypatch)
    monkeypatch.setattr(group_buffers, "WAITING_TOKENS", waiting * batch * SEGMENT)
    monkeypatch.setattr(captured_groups, "WAVE_TOKENS", 1000 if is_wave else 1)
    ids = random_ids(batch, LENGTH)
    found = gradients(uses(trained(group, dtype=torch.float32, **fields), ids, times=1), ids)
    if batch > 1 and is_wave:  # several texts of a wave have no constant distance
        assert all(sides == {"input", "gradients"} for sides in copied.values())
    elif "memory_source" not in fields and not isinstance(fields.get("memory_share"), list):
        with_norm = not {"memory_share", "bptt_segments"} & set(fields)
        assert copied == {
            (24, 32, 16, 16): set(),  # queries, keys and values
            (32, 24): {"input"},
            (24, 40, 40): set(),
            (40, 24): set() if with_norm else {"gradients"},
            (24, 16, 16): set(),  # keys and values of the memory
        }
    without_kernels()
    reference = tiny_model(torch.float32, schedule="sequential", **fields)
    assert_same_gradients(found, gradients(reference, ids), 1e-4)  # sums of 48 tokens in another order


def test_with_the_norms_kernels(interpreter, copied, without_kernels, monkeypatch):
    """In a wave, bands of one and two layers share the sums of norms, with fewer programs for each of two layers."""
    from condense.ops.kernels import triton_rms_norm

    replace_launches(monkeypatch, kept="triton_rms_norm")  # the interpreter is slow
    monkeypatch.setattr(triton_rms_norm, "TILE", 32)
    monkeypatch.setattr(triton_rms_norm, "PROGRAMS", 6)
    monkeypatch.setattr(triton_rms_norm, "SHARED_BY", 1)
    monkeypatch.setattr(group_buffers, "WAITING_TOKENS", 2 * SEGMENT)
    fields, ids = {"num_hidden_layers": 2}, random_ids(1, 3 * SEGMENT)
    model = uses(trained(None, dtype=torch.float32, **fields), ids, times=1)
    found = gradients(model, ids)
    assert copied[24, 40, 40] == copied[24, 32, 16, 16] == set()
    without_kernels()
    assert_same_gradients(found, gradients(tiny_model(torch.float32, schedule="sequential", **fields), ids), 2e-5)


def test_parts_of_a_buffer_share_memory_and_no_version():
    buffer = Buffer(torch.zeros(2 * 3 + 4, 2, 5), distance=3)
    band, other = buffer.of_band(slice(1, 3), newest=2), buffer.of_band(slice(0, 1), newest=0)
    version = other._version
    band.fill_(1)
    expected = torch.zeros(10, 2, 5)
    expected[1 * 3 + 2] = expected[2 * 3 + 1] = 1
    assert torch.equal(buffer.rows_snx, expected)
    assert other._version == version


def test_a_group_holds_no_memory_of_its_capture(monkeypatch):
    replace_launches(monkeypatch)
    made, make = [], GroupBuffers.__init__

    def noted(buffers, *arguments):
        made.append(weakref.ref(buffers))
        make(buffers, *arguments)

    monkeypatch.setattr(GroupBuffers, "__init__", noted)
    models = [uses(trained(group, dtype=torch.float32), random_ids(1, LENGTH)) for group in (None, 2)]
    assert all(model.model.layers._captured_groups._groups for model in models)  # which are alive
    gc.collect()
    assert made and all(one() is None for one in made)
