import pytest
import torch

from condense import layers
from condense.kernels import rms_norm, swiglu
from condense.kernels.extension import extend_rotated, takes_extension_kernel
from condense.kernels.rotary import plain_rotate

from ..models import assert_same_gradients, gradients, random_ids, tiny_model
from .checks import assert_same_function, assert_same_second_derivatives, random
from .test_rotary import ROWS, tables_of, tile  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")

HEADS, MEMORY, WIDTH = 5, 4, 3


def inputs_of(size=6, dtype=torch.float32, transposed=False):
    shapes = [(HEADS, tokens) for tokens in (MEMORY, MEMORY, WIDTH, WIDTH)]
    return [
        random(ROWS, *(shape[::-1] if transposed else shape), size, seed=seed, dtype=dtype)
        for seed, shape in enumerate(shapes)
    ]


def both(tables, transposed=False):
    """The kernel and the plain form, of tensors in the order of their axes, or as projections lay them out."""
    exact = tuple(table.double() for table in tables)

    def ordered(tensors):
        return [tensor.transpose(1, 2) for tensor in tensors] if transposed else tensors

    def kernel(*tensors):
        memory_key, memory_value, *own = ordered(tensors)
        assert takes_extension_kernel((memory_key, memory_value), *own, *tables)
        return extend_rotated((memory_key, memory_value), *own, *tables)

    def plain(*tensors):
        memory_key, memory_value, key, value = ordered(tensors)
        return torch.cat([memory_key, plain_rotate(key, exact)], dim=2), torch.cat([memory_value, value], dim=2)

    return kernel, plain


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS], ids=["1 row of tables", "each row's tables"])
@pytest.mark.usefixtures("tile")
def test_extension(rows, transposed, size):
    assert_same_function(
        *both(tables_of(rows, size), transposed), inputs_of(size, transposed=transposed), num_outputs=2
    )


def test_bfloat16():
    """The memory and the values are not rounded."""
    inputs, tables = inputs_of(dtype=torch.bfloat16), tables_of(1, 6, torch.bfloat16)
    assert_same_function(*both(tables), inputs, num_outputs=2)
    key, value = extend_rotated((inputs[0], inputs[1]), inputs[2], inputs[3], *tables)
    assert torch.equal(key[:, :, :MEMORY], inputs[0])
    assert torch.equal(value, torch.cat([inputs[1], inputs[3]], dim=2))


def test_layout():
    """The results are contiguous; the key's gradient is laid out as what was rotated."""
    inputs = [tensor.requires_grad_() for tensor in inputs_of(transposed=True)]
    outputs = both(tables_of(1, 6), transposed=True)[0](*inputs)
    assert all(output.is_contiguous() for output in outputs)
    assert torch.autograd.grad(outputs[0].sum(), inputs[2])[0].is_contiguous()


def test_second_derivatives():
    assert_same_second_derivatives(*both(tables_of(ROWS, 6)), inputs_of())


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_results_is_unused(used):
    inputs = [tensor.requires_grad_() for tensor in inputs_of()]
    both(tables_of(1, 6))[0](*inputs)[used].sum().backward()
    assert [tensor.grad is not None for tensor in inputs] == [used == 0, used == 1] * 2


def test_what_the_kernel_does_not_take():
    """A memory of another dtype, as from a call without autocast; float64; tables that are learned."""
    memory_key, memory_value, *own = inputs_of()
    tables = tables_of(1, 6)
    assert takes_extension_kernel((memory_key, memory_value), *own, *tables)
    assert not takes_extension_kernel((memory_key.bfloat16(), memory_value.bfloat16()), *own, *tables)
    assert not takes_extension_kernel((memory_key, memory_value.double()), *own, *tables)
    assert not takes_extension_kernel((memory_key[:, :1], memory_value[:, :1]), *own, *tables)
    assert not takes_extension_kernel((memory_key, memory_value), *own, tables[0].requires_grad_(), tables[1])


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_a_model(schedule, monkeypatch, noted):
    """In a wave, rows of the first segment have no memory: their keys are only rotated. The sum at a layer's end has
    its norm, of which the memory is made, from the same kernel."""
    monkeypatch.setattr(swiglu, "uses_kernels", lambda tensor: False)  # the interpreter is slow
    extensions, sums = noted(layers, "extend_rotated"), noted(rms_norm._AddNorm, "apply")
    model, ids = tiny_model(torch.float32, schedule=schedule).train(), random_ids(1, 13)
    loss, found = gradients(model, ids)
    assert {one.arguments[0] is None for one in extensions} == {False, schedule == "wavefront"}
    assert len(sums) == {"sequential": 3 * (2 + 2 + 1), "wavefront": 4 * 2 + 3}[schedule]  # the last segment is partial
    extensions.clear()
    doubled = {name: gradient.double() for name, gradient in found.items()}
    assert_same_gradients((loss, doubled), gradients(model.double(), ids), 1e-5)
    assert not extensions
