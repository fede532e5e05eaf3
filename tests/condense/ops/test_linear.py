"""Products in oneDNN against torch's own, and the cases that are left to torch."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from condense.ops import linear
from condense.ops.linear import apply_linear

pytestmark = [
    pytest.mark.skipif(not linear.HAS_ONEDNN, reason="torch has no oneDNN for this processor"),
    pytest.mark.unit,
]
SHAPES = [(3, 5, 16), (1, 4, 16), (7, 16), (16,), (2, 0, 16)]


@pytest.fixture(autouse=True)
def small_products_too(monkeypatch):
    monkeypatch.setattr(linear, "ONEDNN_MULTIPLICATIONS", 0)


@pytest.fixture
def calls(noted):
    """The products that oneDNN has computed."""
    return noted(linear, "_onednn")


class Ours(nn.Linear):
    """A linear map as the model computes it."""

    def forward(self, input_xI):
        return linear.linear(input_xI, self.weight, self.bias)


def twins(bias=True, dtype=torch.float32):
    """A linear map as the model computes it, and torch's with the same weights."""
    torch.manual_seed(0)
    ours, stock = (kind(16, 6, bias=bias, dtype=dtype) for kind in (Ours, nn.Linear))
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def gradients(module, input_xI, *more):
    input_xI = input_xI.detach().clone().requires_grad_()
    output = module(input_xI)
    (output * torch.arange(output.numel()).reshape(output.shape)).sum().backward()
    return [output.detach(), input_xI.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_torch_in_float64(shape, bias, calls):
    ours, stock = twins(bias)
    input_xI = torch.randn(shape)
    found, expected = gradients(ours, input_xI), gradients(stock.double(), input_xI.double())
    assert len(calls) == 2  # forward and the input's gradient
    torch.testing.assert_close(found, [one.float() for one in expected])


def test_inputs_and_gradients_with_other_strides(calls):
    """A transposed input, a broadcast one, and a gradient that is one number expanded."""
    ours, stock = twins()
    for input_xI in (torch.randn(16, 5).t(), torch.randn(1, 16).expand(5, 16), torch.randn(5, 32)[:, ::2]):
        torch.testing.assert_close(gradients(ours, input_xI), gradients(stock, input_xI))
        input_xI = input_xI.clone().requires_grad_()
        sums = [torch.autograd.grad(module(input_xI).sum(), [input_xI, module.weight]) for module in (ours, stock)]
        torch.testing.assert_close(*sums)
    assert calls


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_gradients_of_a_part(frozen):
    ours, stock = twins()
    found = []
    for module in (ours, stock):
        torch.manual_seed(1)
        input_xI = torch.randn(4, 16, requires_grad=frozen != "input")
        if frozen != "input":
            module.get_parameter(frozen).requires_grad_(False)
        module(input_xI).pow(2).sum().backward()
        found.append([tensor.grad for tensor in (input_xI, module.weight, module.bias)])
    assert [one is None for one in found[0]] == [one is None for one in found[1]]
    torch.testing.assert_close(*([one for one in each if one is not None] for each in found))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_weight_keeps_no_input(frozen):
    ours, stock = twins(bias=False)
    kept = []
    for module in (ours, stock):
        module.weight.requires_grad_(not frozen)
        input_xI, found = torch.randn(4, 16, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, found=found: found.append(tensor), lambda _: None):
            module(input_xI)
        kept.append(any(tensor.data_ptr() == input_xI.data_ptr() for tensor in found))
    assert kept == [not frozen, not frozen]


def test_second_derivatives():
    ours, _ = twins()
    weight, bias = (parameter.detach() for parameter in ours.parameters())
    input_xI = torch.randn(3, 16, requires_grad=True)
    second = []
    for product in (linear._Linear.apply, F.linear):
        leaf = weight.clone().requires_grad_()
        (first,) = torch.autograd.grad(product(input_xI, leaf, bias).pow(3).sum(), input_xI, create_graph=True)
        second.append(torch.autograd.grad(first.pow(2).sum(), [input_xI, leaf]))
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)


def test_checkpointing_threads_and_retained_graphs():
    ours, stock = twins()
    input_xI = torch.randn(5, 16)
    found = []
    for module in (ours, stock):
        output = checkpoint(module, input_xI, use_reentrant=False) + module(input_xI)
        loss = output.pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        threads = [threading.Thread(target=lambda m=module: m(input_xI).sum().backward()) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join()
        found.append([module.weight.grad, module.bias.grad])
    torch.testing.assert_close(*found)


def test_a_changed_weight_is_noticed_before_the_backward_pass():
    ours, _ = twins()
    loss = ours(torch.randn(3, 16, requires_grad=True)).sum()
    with torch.no_grad():
        ours.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Halved(nn.Module):
    """Stands for an adapter around a linear map."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, input_xI):
        return self.module(input_xI) / 2


def with_forward(module):
    """As accelerate makes them."""
    module.forward = partial(nn.Linear.forward, module)
    return module


@pytest.mark.parametrize("case", ["plain", "hook", "hook on all modules", "another module", "a forward of its own"])
def test_modules_keep_their_code_and_get_our_products(case, calls):
    _, stock = twins()
    input_xI, seen = torch.randn(3, 5, 16), []
    module = {"another module": Halved, "a forward of its own": with_forward}.get(case, lambda one: one)(stock)
    expected = module(input_xI)
    registers = {"hook": module.register_forward_hook, "hook on all modules": register_module_forward_hook}
    if case in registers:
        handle = registers[case](lambda module, _, output: (seen.append(module), 3 * output)[1])
        expected = 3 * expected
    torch.testing.assert_close(apply_linear(module, input_xI), expected)
    assert seen == [stock] * (case in registers) and len(calls) == (case != "another module")
    if case in registers:
        handle.remove()


@pytest.mark.parametrize("case", ["float64", "bfloat16", "autocast", "counted", "switched off", "inference", "few"])
def test_what_is_left_to_torch(case, calls, monkeypatch):
    """Inference mode is not: there is no gradient to keep."""
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(case, torch.float32)
    ours, stock = twins(dtype=dtype)
    input_xI = torch.randn(3, 16, dtype=dtype)
    if case == "few":
        monkeypatch.setattr(linear, "ONEDNN_MULTIPLICATIONS", 3 * 16 * 6 + 1)
    counter = FlopCounterMode(display=False)
    context = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "counted": counter,
        "switched off": torch.backends.mkldnn.flags(enabled=False),
        "inference": torch.inference_mode(),
    }.get(case, torch.enable_grad())
    with context:
        torch.testing.assert_close(ours(input_xI), stock(input_xI))
    assert bool(calls) == (case == "inference")
    assert case != "counted" or counter.get_total_flops() == 2 * 2 * 3 * 16 * 6


def test_transforms_are_left_to_torch(calls):
    ours, stock = twins()
    input_xI = torch.randn(4, 3, 16)
    found, expected = (torch.func.vmap(module)(input_xI) for module in (ours, stock))
    torch.testing.assert_close(found, expected)
    tangents = [torch.func.jvp(module, (input_xI,), (input_xI,))[1] for module in (ours, stock)]
    torch.testing.assert_close(*tangents)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input_xI, torch.ones_like(input_xI))
        tangents = [torch.autograd.forward_ad.unpack_dual(module(dual)).tangent for module in (ours, stock)]
    torch.testing.assert_close(*tangents)
    assert not calls
