import pytest
import torch

from condense.execution import stacked_parameters, stacked_products
from condense.ops.kernels import rms_norm, rotary, swiglu
from condense.ops.kernels.swiglu import plain_silu_product, silu_product

from ...models import assert_same_gradients, gradients, random_ids, tiny_model
from .checks import assert_same_function, assert_same_second_derivatives, dtypes, random

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=[1024, 8], ids=lambda block: f"blocks of {block}")
def block(request, interpreter, monkeypatch):
    from condense.ops.kernels import triton_swiglu

    monkeypatch.setattr(triton_swiglu, "BLOCK", request.param)


@pytest.fixture
def only_the_kernel(monkeypatch):
    monkeypatch.setattr(swiglu, "plain_silu_product", None)


@dtypes
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1), (2, 3, 8), (4, 17)])
@pytest.mark.usefixtures("block", "only_the_kernel")
def test_product(shape, dtype):
    assert_same_function(silu_product, plain_silu_product, [random(*shape, seed=n, dtype=dtype) for n in range(2)])


@pytest.mark.usefixtures("block", "only_the_kernel")
def test_halves():
    of_halves = [lambda joined, f=f: f(*joined.chunk(2, -1)) for f in (silu_product, plain_silu_product)]
    assert_same_function(*of_halves, [3 * random(2, 3, 22)])


@pytest.mark.usefixtures("only_the_kernel")
def test_transposed():
    def product(gate, up):
        return silu_product(gate.transpose(0, 1), up.t().contiguous())

    assert_same_function(product, lambda *pair: plain_silu_product(*(one.t() for one in pair)), [random(5, 3)] * 2)


@pytest.mark.usefixtures("only_the_kernel")
def test_large_gates():
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]])
    assert_same_function(silu_product, plain_silu_product, [gate, random(1, 5)])


def test_gradient_of_a_sum():
    """Its gradient is one number, at every place."""
    gate = random(3, 4).requires_grad_()
    (found,) = torch.autograd.grad(silu_product(gate, gate).sum(), gate)
    (expected,) = torch.autograd.grad(plain_silu_product(gate, gate).sum(), gate)
    assert torch.allclose(found, expected)


def test_second_derivatives():
    assert_same_second_derivatives(silu_product, plain_silu_product, [random(3, 5), random(3, 5, seed=1)])


@pytest.mark.parametrize("up", [random(5), random(3, 5).double()], ids=["broadcast", "float64"])
def test_plain(up):
    assert torch.equal(silu_product(random(3, 5), up), plain_silu_product(random(3, 5), up))


def test_both_gradients_go_to_the_input_by_one_product(monkeypatch, noted):
    """They lie side by side, as the weights do, through the views between the kernel and the products."""
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    joined = noted(stacked_products, "side_by_side")
    for module in (rms_norm, rotary):  # the interpreter is slow
        monkeypatch.setattr(module, "uses_kernels", lambda tensor: False)
    model, ids = tiny_model(torch.bfloat16, schedule="wavefront").train(), random_ids(1, 25)
    found = gradients(model, ids)
    assert (2, 2) in [(len(one.arguments[0]), one.options["dim"]) for one in joined if one.result is not None]
    model.config.schedule = "sequential"
    assert_same_gradients(found, gradients(model, ids), 0.1)
