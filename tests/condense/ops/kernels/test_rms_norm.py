import pytest
import torch
import torch.nn.functional as F

from condense.ops.kernels import rms_norm as module
from condense.ops.kernels.rms_norm import add_rms_norm, input_and_rms_norm, plain_rms_norm, rms_norm

from .checks import (
    assert_near,
    assert_same_function,
    assert_same_second_derivatives,
    assert_written,
    dtypes,
    in_parts,
    random,
)

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.unit]

EPSILON = 0.1
SHAPES = {
    "few": ((3, 5), (5,)),
    "groups": ((4, 3, 5), (2, 5)),
    "many groups": ((5, 4), (5, 4)),
    "width 1": ((4, 1), (2, 1)),
}

shapes = pytest.mark.parametrize(("shape", "weight_shape"), SHAPES.values(), ids=SHAPES)


def plain_add_rms_norm(hidden, residual, weight, epsilon):
    return hidden + residual, plain_rms_norm(hidden + residual, weight, epsilon)


@pytest.fixture(params=[(2048, 512), (16, 2)], ids=lambda sizes: "tile {}, programs {}".format(*sizes))
def tiles(request, interpreter, monkeypatch):
    from condense.ops.kernels import triton_rms_norm

    monkeypatch.setattr(triton_rms_norm, "TILE", request.param[0])
    monkeypatch.setattr(triton_rms_norm, "PROGRAMS", request.param[1])


@pytest.fixture
def only_the_kernel(monkeypatch):
    monkeypatch.setattr(module, "plain_rms_norm", None)


@shapes
@pytest.mark.usefixtures("tiles", "only_the_kernel")
def test_norm(shape, weight_shape):
    assert_same_function(rms_norm, plain_rms_norm, [random(*shape), 1 + random(*weight_shape, seed=1)], [EPSILON])


@shapes
@pytest.mark.usefixtures("tiles", "only_the_kernel")
def test_norm_of_a_sum(shape, weight_shape):
    inputs = [random(*shape), random(*shape, seed=1), 1 + random(*weight_shape, seed=2)]
    assert_same_function(add_rms_norm, plain_add_rms_norm, inputs, [EPSILON], num_outputs=2)


@shapes
@pytest.mark.usefixtures("tiles", "only_the_kernel")
def test_norm_and_its_input(shape, weight_shape):
    """The gradients of both uses of the input come from the kernel."""

    def plain(hidden, weight, epsilon):
        return hidden, plain_rms_norm(hidden, weight, epsilon)

    inputs = [random(*shape), 1 + random(*weight_shape, seed=1)]
    assert_same_function(input_and_rms_norm, plain, inputs, [EPSILON], num_outputs=2)


@pytest.mark.parametrize("adds", [False, True], ids=["norm", "norm of a sum"])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.usefixtures("tiles")
def test_given_memory(num_parts, adds):
    """Rows in parts that lie apart; the gradients of the weights of two calls are added up."""
    normed, of_input = in_parts(num_parts, 12, 5), in_parts(num_parts, 12, 5)
    of_weights = torch.zeros(2, module.num_parts(6, 5), 5)
    weight = (1 + random(2, 5, seed=1)).requires_grad_()
    inputs = [random(4, 3, 5, seed=seed).requires_grad_() for seed in (2, 3)[: 1 + adds]]
    function = add_rms_norm if adds else input_and_rms_norm
    found = function(*inputs, weight, EPSILON, normed, of_input, of_weights)
    factors = [random(4, 3, 5, seed=seed) for seed in (4, 5)]
    strided = in_parts(4, 12, 5).copy_(factors[0])  # as from another kernel
    exact = [tensor.detach().double().requires_grad_() for tensor in (*inputs, weight)]
    total = sum(exact[:-1])
    expected = total, plain_rms_norm(total, exact[-1], EPSILON)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    of_inputs = torch.autograd.grad(found, inputs, [strided, factors[1]], retain_graph=True)
    *of_exact, of_weight = torch.autograd.grad(expected, exact, [factor.double() for factor in factors])
    for one, other in zip(of_inputs, of_exact, strict=True):
        assert_near(one, other)
    assert_near(of_weights.sum(1), of_weight)
    assert torch.autograd.grad(found[1], weight, factors[1], allow_unused=True) == (None,)
    assert_near(of_weights.sum(1), 2 * of_weight)
    for memory in (normed, of_input):
        assert_written(memory)


def test_fewer_groups_have_no_more_programs(tiles):
    from condense.ops.kernels.triton_rms_norm import _programs

    for tiles_of_group in range(1, 40):
        most = _programs(tiles_of_group, 1)[1]
        assert all(_programs(tiles_of_group, groups)[1] <= most for groups in range(1, 9))


@pytest.mark.usefixtures("only_the_kernel")
def test_bfloat16():
    hidden, weight = random(6, 5, 11, dtype=torch.bfloat16), random(3, 11, seed=1, dtype=torch.bfloat16)
    assert_same_function(rms_norm, plain_rms_norm, [hidden, weight], [EPSILON])
    inputs = [hidden, random(6, 5, 11, seed=2, dtype=torch.bfloat16), weight]
    assert_same_function(add_rms_norm, plain_add_rms_norm, inputs, [EPSILON], num_outputs=2)
    total, normed = add_rms_norm(*inputs, EPSILON)
    exact = module._norm(total.double().view(3, 2, 5, 11), weight[:, None, None], EPSILON).view(6, 5, 11).double()
    assert_near(normed.float(), exact, 4e-3)


@dtypes
def test_weight_in_float32(dtype):
    """As under autocast: the result has the dtype of the product."""
    hidden, weight = random(4, 6, dtype=dtype).requires_grad_(), random(6).requires_grad_()
    normed = rms_norm(hidden, weight, EPSILON)
    assert normed.dtype == torch.float32 == plain_rms_norm(hidden, weight, EPSILON).dtype
    of_hidden, of_weight = torch.autograd.grad(normed.sum(), [hidden, weight])
    assert of_hidden.dtype == dtype and of_weight.dtype == torch.float32


def test_against_torch():
    hidden, weight = random(4, 6), random(6)
    expected = F.rms_norm(hidden.double(), (6,), weight.double(), EPSILON)
    assert_near(rms_norm(hidden, weight, EPSILON), expected)
    assert_near(plain_rms_norm(hidden, weight, EPSILON), expected)


@pytest.mark.usefixtures("only_the_kernel")
def test_views():
    """Rows of hidden states, and weights, are parts of larger tensors, and heads are transposed."""

    def of_views(norm):
        return lambda hidden, weight: norm(hidden[..., 2:9], weight[:, 1:8], EPSILON)

    assert_same_function(of_views(rms_norm), of_views(plain_rms_norm), [random(4, 3, 12), random(2, 9, seed=1)])

    def transposed(norm):
        return lambda hidden, weight: norm(hidden.transpose(1, 2), weight, EPSILON)

    assert_same_function(transposed(rms_norm), transposed(plain_rms_norm), [random(2, 3, 4, 6), random(6, seed=1)])


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_alone(used):
    inputs = [random(3, 5), random(3, 5, seed=1), random(5, seed=2)]

    def one(norm):
        return lambda hidden, residual, weight: norm(hidden, residual, weight, EPSILON)[used] + 0 * weight

    assert_same_function(one(add_rms_norm), one(plain_add_rms_norm), inputs)


def test_no_gradient_of_the_weight():
    hidden = random(3, 5).requires_grad_()
    (found,) = torch.autograd.grad(rms_norm(hidden, random(5), EPSILON).square().sum(), hidden)
    (expected,) = torch.autograd.grad(plain_rms_norm(hidden, random(5), EPSILON).square().sum(), hidden)
    assert_near(found, expected.double())


def test_second_derivatives():
    inputs = [random(4, 3, 5), random(4, 3, 5, seed=1), random(2, 5, seed=2)]
    assert_same_second_derivatives(rms_norm, plain_rms_norm, [inputs[0], inputs[2]], [EPSILON])
    assert_same_second_derivatives(add_rms_norm, plain_add_rms_norm, inputs, [EPSILON])


def test_a_sum_of_two_dtypes_has_the_norms_kernel(noted):
    """As under autocast, where the output of a linear map has fewer bits than what it is added to."""
    norms = noted(module._Norm, "apply")
    hidden, residual, weight = random(3, 8, dtype=torch.bfloat16), random(3, 8, seed=1), random(8, seed=2)
    total, normed = add_rms_norm(hidden, residual, weight, EPSILON)
    assert len(norms) == 1 and total.dtype == torch.float32
    assert_near(normed, plain_rms_norm(total.double(), weight.double(), EPSILON))


def test_plain():
    for width in (5, 9000):
        hidden = random(2, width, dtype=torch.float64 if width == 5 else torch.float32)
        weight = torch.ones(width, dtype=hidden.dtype)
        assert torch.equal(rms_norm(hidden, weight, EPSILON), plain_rms_norm(hidden, weight, EPSILON))
