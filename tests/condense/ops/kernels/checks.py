"""Comparisons of a kernel with the plain form in float64."""

import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of norms

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


def in_parts(num_parts, num_rows, width):
    """Memory for the rows of a kernel's result: each part ends before the next one begins."""
    return torch.full((num_parts, num_rows // num_parts + 2, width), float("nan"))[:, 1:-1]


def assert_written(rows_mnD):
    """All rows are written, and nothing beside them."""
    whole = rows_mnD._base
    assert whole[:, [0, -1]].isnan().all() and not whole[:, 1:-1].isnan().any()


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found, expected, tolerance=None):
    assert found.shape == expected.shape
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    error, norm = (found.double() - expected).norm(), expected.norm()
    assert error <= tolerance * norm, f"{error:.1e} of {norm:.1e}"  # false for nan


def assert_same_function(kernel, plain, inputs, settings=(), num_outputs=1):
    """The outputs and the gradients by all inputs; gradients of outputs are random, and not those of a sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = _outputs(kernel(*leaves, *settings)), _outputs(plain(*exact, *settings))
    assert len(found) == len(expected) == num_outputs
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    factors = [random(*one.shape, seed=7 + n, dtype=one.dtype) for n, one in enumerate(found)]
    of_found = torch.autograd.grad(found, leaves, factors)
    of_expected = torch.autograd.grad(expected, exact, [factor.double() for factor in factors])
    for leaf, one, other in zip(leaves, of_found, of_expected, strict=True):
        assert one.dtype == leaf.dtype
        assert_near(one, other)


def assert_same_second_derivatives(kernel, plain, inputs, settings=()):
    """Derivatives of the squared norm of the gradients, where the inputs depend on each other."""
    found = _second(kernel, inputs, settings)
    for one, other in zip(found, _second(plain, [tensor.double() for tensor in inputs], settings), strict=True):
        assert_near(one, other, 1e-5)


def _second(function, inputs, settings):
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    dependent = [leaves[0] * 1, *(leaf + 0.1 * leaves[0].mean() for leaf in leaves[1:])]
    outputs = _outputs(function(*dependent, *settings))
    loss = sum((n + 1) * output.pow(3).sum() for n, output in enumerate(outputs))
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)


def _outputs(result):
    return result if isinstance(result, tuple) else (result,)
