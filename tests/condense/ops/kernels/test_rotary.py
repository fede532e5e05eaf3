import pytest
import torch

from condense.ops.kernels import rotary
from condense.ops.kernels.rotary import plain_rotate, rotate

from .checks import assert_same_function, assert_same_second_derivatives, random

pytestmark = pytest.mark.usefixtures("poisoned")

ROWS, HEADS, WIDTH = 2, 5, 3

sizes = pytest.mark.parametrize("size", [2, 6])
table_rows = pytest.mark.parametrize("rows", [1, ROWS], ids=["1 row of tables", "each row's tables"])


@pytest.fixture(params=[1024, 8], ids=lambda tile: f"tile {tile}")
def tile(request, interpreter, monkeypatch):
    from condense.ops.kernels import triton_rotary

    monkeypatch.setattr(triton_rotary, "TILE", request.param)


@pytest.fixture
def only_the_kernel(monkeypatch):
    monkeypatch.setattr(rotary, "plain_rotate", None)


def tables_of(rows, size, dtype=torch.float32):
    """Other than those of angles, their halves differ."""
    return random(rows, 1, WIDTH, size, seed=1, dtype=dtype), random(rows, 1, WIDTH, size, seed=2, dtype=dtype)


def both(tables, transposed=False):
    """The kernel and the plain form, of queries in the order of their axes, or as projections lay them out."""
    exact = tuple(table.double() for table in tables)
    ordered = (lambda tensor: tensor.transpose(1, 2)) if transposed else (lambda tensor: tensor)
    return lambda tensor: rotate(ordered(tensor), tables), lambda tensor: plain_rotate(ordered(tensor), exact)


@sizes
@table_rows
@pytest.mark.usefixtures("tile", "only_the_kernel")
def test_rotation(rows, size):
    check_rotation(rows, size, torch.float32)


@pytest.mark.usefixtures("only_the_kernel")
def test_bfloat16():
    check_rotation(1, 6, torch.bfloat16)


def check_rotation(rows, size, dtype):
    tables = tables_of(rows, size, dtype)
    assert_same_function(*both(tables), [random(ROWS, HEADS, WIDTH, size, dtype=dtype)])
    assert_same_function(*both(tables, transposed=True), [random(ROWS, WIDTH, HEADS, size, dtype=dtype)])


@pytest.mark.usefixtures("only_the_kernel")
def test_layout():
    """Rotated tensors are contiguous; the gradient is laid out as what was rotated."""
    projected = random(ROWS, WIDTH, HEADS, 6).requires_grad_()
    rotated = rotate(projected.transpose(1, 2), tables_of(1, 6))
    assert rotated.is_contiguous()
    (gradient,) = torch.autograd.grad(rotated.sum(), projected)
    assert gradient.is_contiguous()


def test_second_derivatives():
    assert_same_second_derivatives(*both(tables_of(ROWS, 6)), [random(ROWS, HEADS, WIDTH, 6)])


def test_tables_with_gradients():
    tables, tensor = tables_of(1, 6), random(ROWS, HEADS, WIDTH, 6)
    learned = tables[0].requires_grad_(), tables[1]
    assert torch.autograd.grad(rotate(tensor, learned).sum(), learned[0])[0].shape == tables[0].shape
