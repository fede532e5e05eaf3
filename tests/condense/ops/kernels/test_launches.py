"""The kernels and operations of a captured group, counted."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from condense.execution import cuda_graph, group_buffers, stacked_parameters
from condense.execution.cuda_graph import Graphs, Pool

from ...execution.graphed import trained, uses
from ...execution.test_graph import is_view
from ...models import random_ids
from .plain_launches import LAUNCHES, MODULES

SEGMENT = 5
COMPUTES_NOTHING = {"promote_types", "set_", "_unsafe_view"}  # and what makes empty tensors


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not is_view(function) and "empty" not in name and name not in COMPUTES_NOTHING:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def captures(monkeypatch):
    """Counts the operations of each capture, and a launch of a kernel as one of them."""
    found = []

    def capture(compute, device, pool=None):
        with Operations() as operations:
            outputs = compute()
        found.append(operations.counts)
        return lambda: None, outputs

    def launch(name, function):
        def counted(*arguments, **options):
            mode = torch.utils._python_dispatch._get_current_dispatch_mode()
            if mode is not None:
                mode.counts[function.__name__] += 1
            with _disable_current_modes():
                return function(*arguments, **options)

        monkeypatch.setattr(f"condense.ops.kernels.{name}", counted)

    for name, function in LAUNCHES.items():
        launch(name, function)
    for module in MODULES:
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: tensor.dtype != torch.float64)
    graphs = Graphs(lambda device: Pool(None, None), lambda compute, device: compute(), capture)
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", graphs)
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    return found


FORWARD = {
    "cat": 1,  # the new segment enters
    "norm": 1,
    "add_norm": 2,
    "bmm": 5,  # queries, keys and values; output; gate and up; down; keys and values of the memory
    "rotate_into": 2,  # queries, keys of the memory
    "extend_into": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "clone": 1,  # the output of attention on a CPU, whose heads come before its tokens
    "silu_product_into": 1,
}
BACKWARD = {
    "cat": 1,  # the gradient of the segment that leaves
    "norm_gradients": 3,
    "bmm": 5,
    "write_gradients": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "silu_product_gradients_into": 1,
}


@pytest.mark.parametrize("group", [None, 64], ids=["stored", "again"])
def test_a_further_segment(group, captures, monkeypatch):
    """One more segment is one more diagonal. The products for weight gradients are not part of it: they wait for the
    rows of all segments here, and only the output of attention is copied for them."""
    monkeypatch.setattr(group_buffers, "WAITING_TOKENS", 10**6)
    counts = []
    for segments in (8, 9):
        captures.clear()
        uses(trained(group, dtype=torch.bfloat16), random_ids(1, SEGMENT * segments))
        counts.append([Counter(one) for one in captures])
    (forward, backward), (more_forward, more_backward) = counts
    assert more_forward - forward == Counter(FORWARD) and not forward - more_forward
    expected = Counter(BACKWARD) if group is None else Counter(BACKWARD) + Counter(FORWARD)
    assert more_backward - backward == expected and not backward - more_backward
    assert backward["add_products_"] == 3 * 5
