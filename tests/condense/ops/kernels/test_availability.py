import sys
from functools import cache

import pytest
import torch
from torch import nn

from condense.ops.kernels import availability
from condense.ops.kernels.availability import uses_kernels
from condense.ops.kernels.swiglu import silu_product

from ...models import Operations

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted(dtype):
    assert uses_kernels(torch.ones(2, dtype=dtype)) and uses_kernels(nn.Parameter(torch.ones(2, dtype=dtype)))


def test_other_tensors():
    for tensor in (torch.ones(2).double(), torch.ones(2).long(), torch.ones(2, device="meta"), torch.ones(0)):
        assert not uses_kernels(tensor)
    with torch._subclasses.FakeTensorMode():
        assert not uses_kernels(torch.ones(2))


def test_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not uses_kernels(torch.ones(2))


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "triton.language", None)
    monkeypatch.setattr(availability, "has_triton", availability.has_triton.__wrapped__)
    assert not uses_kernels(torch.ones(2))


@pytest.mark.parametrize(("has_triton", "capability", "said"), [(False, (9, 0), "imported"), (True, (7, 5), "too old")])
def test_says_why_once(has_triton, capability, said, monkeypatch, caplog):
    monkeypatch.setattr(availability, "has_triton", lambda: has_triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    monkeypatch.setattr(availability, "_is_supported", cache(availability._is_supported.__wrapped__))
    assert not availability._is_supported(0) and not availability._is_supported(0)
    assert len(caplog.messages) == 1 and said in caplog.text


def test_says_once_that_a_dtype_has_no_kernels(caplog):
    availability._has_kernels.cache_clear()
    assert availability._has_kernels(torch.bfloat16)
    assert not availability._has_kernels(torch.float64) and not availability._has_kernels(torch.float64)
    assert len(caplog.messages) == 1 and "torch.float64" in caplog.text


def test_watched():
    with Operations():
        assert not uses_kernels(torch.ones(2))


def test_transformed():
    seen = []

    def function(tensor):
        seen.append(uses_kernels(tensor))
        return silu_product(tensor, tensor).sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(3, 2))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(2))
    assert seen == [False] * 3


def test_compiled():
    function = torch.compile(silu_product, backend="eager", fullgraph=True)
    gate = torch.ones(2, 3)
    assert torch.equal(function(gate, gate), nn.functional.silu(gate) * gate)
