import pytest
import torch

from condense.execution import band
from condense.ops.kernels import rms_norm, swiglu
from condense.ops.kernels.attention_inputs import attention_inputs, memory_of, takes_attention_kernels
from condense.ops.kernels.rotary import plain_rotate

from ...models import assert_same_gradients, gradients, random_ids, tiny_model
from .checks import assert_same_function, assert_same_second_derivatives, assert_written, in_parts, random
from .test_rotary import ROWS, tables_of, tile  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")

QUERIES, HEADS, MEMORY, WIDTH = 6, 5, 4, 3


def inputs_of(with_memory=ROWS, size=6, dtype=torch.float32):
    """Queries, keys and values as projections lay them out, then the memory's keys and values of some rows."""
    own = [
        random(ROWS, WIDTH, heads, size, seed=seed, dtype=dtype) for seed, heads in enumerate((QUERIES, HEADS, HEADS))
    ]
    return own + [random(with_memory, HEADS, MEMORY, size, seed=seed, dtype=dtype) for seed in (3, 4) if with_memory]


def by_head(tensors):
    query, key, value, *memory = tensors
    return *(one.transpose(1, 2) for one in (query, key, value)), tuple(memory) or None


def kernels(tables, of_own=None):
    def function(*tensors):
        *own, memory = by_head(tensors)
        assert takes_attention_kernels(*own, memory, tables)
        return tuple(one for part in attention_inputs(*own, memory, tables, of_own) for one in part)

    return function


def plain(tables):
    exact = tuple(table.double() for table in tables)

    def function(*tensors):
        query, key, value, memory = by_head(tensors)
        query, key = plain_rotate(query, exact), plain_rotate(key, exact)
        num = 0 if memory is None else len(memory[0])
        extended = [torch.cat(pair, dim=2) for pair in zip(memory or (), (key[:num], value[:num]), strict=False)]
        parts = [(query[:num], *extended)] if num else []
        parts += [(query[num:], key[num:], value[num:])] if num < ROWS else []
        return tuple(one for part in parts for one in part)

    return function


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("with_memory", [0, 1, ROWS], ids="{} rows with a memory".format)
@pytest.mark.parametrize("num_tables", [1, ROWS], ids=["1 row of tables", "each row's tables"])
@pytest.mark.parametrize("num_parts", [None, 1, ROWS], ids="parts of the gradients: {}".format)
@pytest.mark.usefixtures("tile")
def test_attention_inputs(num_parts, num_tables, with_memory, size):
    tables = tables_of(num_tables, size)
    of_own = num_parts and in_parts(num_parts, ROWS * WIDTH, (QUERIES + 2 * HEADS) * size)
    outputs = 6 if with_memory == 1 else 3
    inputs = inputs_of(with_memory, size)
    assert_same_function(kernels(tables, of_own), plain(tables), inputs, num_outputs=outputs)
    if num_parts:
        assert_written(of_own)


@pytest.mark.parametrize("num_parts", [None, 1, ROWS])
def test_memory_of(num_parts):
    tables = tables_of(ROWS, 6)
    exact = tuple(table.double() for table in tables)
    of_own = num_parts and in_parts(num_parts, ROWS * WIDTH, 2 * HEADS * 6)

    def kernel(key, value):
        return memory_of(key.transpose(1, 2), value.transpose(1, 2), tables, of_own)

    def expected(key, value):
        return plain_rotate(key.transpose(1, 2), exact), value.transpose(1, 2)

    assert_same_function(kernel, expected, inputs_of()[1:3], num_outputs=2)
    if num_parts:
        assert_written(of_own)


def test_bfloat16():
    """The memory and the values are not rounded, and neither are the values' gradients."""
    inputs, tables = inputs_of(dtype=torch.bfloat16), tables_of(1, 6, torch.bfloat16)
    assert_same_function(kernels(tables), plain(tables), inputs, num_outputs=3)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    _, key, value = kernels(tables)(*leaves)
    assert torch.equal(key[:, :, :MEMORY], inputs[3])
    assert torch.equal(value, torch.cat([inputs[4], inputs[2].transpose(1, 2)], dim=2))
    factor = random(*value.shape, seed=9, dtype=torch.bfloat16)
    of_value, of_memory = torch.autograd.grad(value, [leaves[2], leaves[4]], factor)
    assert torch.equal(torch.cat([of_memory, of_value.transpose(1, 2)], dim=2), factor)


def test_layout():
    """The results are contiguous; the gradients of queries, keys and values lie side by side for each token."""
    inputs = [tensor.requires_grad_() for tensor in inputs_of()]
    outputs = kernels(tables_of(1, 6))(*inputs)
    assert all(output.is_contiguous() for output in outputs)
    found = torch.autograd.grad([output.sum() for output in outputs], inputs[:3])
    offsets = [one.storage_offset() for one in found]
    assert offsets == [0, QUERIES * 6, (QUERIES + HEADS) * 6]
    assert {one.untyped_storage().data_ptr() for one in found} == {found[0].untyped_storage().data_ptr()}
    assert all(one.stride() == (WIDTH * one.stride(1), (QUERIES + 2 * HEADS) * 6, 6, 1) for one in found)


@pytest.mark.parametrize("with_memory", [0, 1, ROWS])
def test_second_derivatives(with_memory):
    tables = tables_of(ROWS, 6)
    assert_same_second_derivatives(kernels(tables), plain(tables), inputs_of(with_memory))


@pytest.mark.parametrize("used", [0, 1, 2])
def test_unused_results(used):
    def one(function):
        return lambda *tensors: function(*tensors)[used] + sum(0 * tensor.sum() for tensor in tensors)

    tables = tables_of(1, 6)
    assert_same_function(one(kernels(tables)), one(plain(tables)), inputs_of())


def test_what_the_kernels_do_not_take():
    """A memory of another dtype, as from a call without autocast; float64; other heads; tables that are learned."""
    query, key, value, memory = by_head(inputs_of())
    tables = tables_of(1, 6)
    assert takes_attention_kernels(query, key, value, memory, tables)
    assert takes_attention_kernels(None, key, value, None, tables)
    half = tuple(one.bfloat16() for one in memory)
    fewer = tuple(one[:, :1] for one in memory)
    learned = tables[0].clone().requires_grad_(), tables[1]
    for changed in (
        (query, key, value, half, tables),
        (query.double(), key, value, memory, tables),
        (query, key, value.double(), memory, tables),
        (query, key, value, (memory[0], memory[1].double()), tables),
        (query[..., :4], key, value, memory, tables),
        (query, key, value, fewer, tables),
        (query, key, value[:, :1], memory, tables),
        (query, key, value, memory, learned),
    ):
        assert not takes_attention_kernels(*changed)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_a_model(schedule, monkeypatch, noted):
    """In a wave, the first segment's rows have no memory, and norms of sums have their own kernel: after attention, and
    at the end of a layer, of whose sum the memory is made. Layers in order have a kernel for each norm."""
    monkeypatch.setattr(swiglu, "uses_kernels", lambda tensor: False)  # the interpreter is slow
    inputs, norms = noted(band, "attention_inputs"), noted(rms_norm._Norm, "apply")
    model, ids = tiny_model(torch.float32, schedule=schedule).train(), random_ids(1, 13)
    loss, found = gradients(model, ids)
    assert {len(one.result) for one in inputs} == (set() if schedule == "sequential" else {1, 2})
    sums = [one for one in norms if one.arguments[1] is not None]
    assert len(sums) == {"sequential": 0, "wavefront": 4 * 2}[schedule]
    last = 3 * 2 + 1  # of the short segment, which writes no memory, and the final norm
    assert len(norms) == {"sequential": 2 * 3 * 3, "wavefront": 4 * 3}[schedule] + last
    inputs.clear()
    doubled = {name: gradient.double() for name, gradient in found.items()}
    assert_same_gradients((loss, doubled), gradients(model.double(), ids), 1e-5)
    assert not inputs
