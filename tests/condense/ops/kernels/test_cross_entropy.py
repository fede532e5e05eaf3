import pytest
import torch
import torch.nn.functional as F

from condense.ops.kernels import cross_entropy
from condense.ops.kernels.cross_entropy import cross_entropy_and_gradient, plain_cross_entropy_and_gradient

from .checks import assert_near, dtypes, random

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.unit]


@pytest.fixture(autouse=True, params=[8192, 16], ids=lambda block: f"blocks of {block}")
def block(request, interpreter, monkeypatch):
    from condense.ops.kernels import triton_cross_entropy

    monkeypatch.setattr(triton_cross_entropy, "BLOCK", request.param)


@pytest.fixture(autouse=True)
def only_the_kernel(monkeypatch):
    monkeypatch.setattr(cross_entropy, "plain_cross_entropy_and_gradient", None)


def assert_losses_and_gradient(logits_nV, target_n):
    expected_n, of_expected_nV = plain_cross_entropy_and_gradient(logits_nV.double(), target_n)
    dtype, before_nV = logits_nV.dtype, logits_nV.clone()
    losses_n, nothing = cross_entropy_and_gradient(logits_nV, target_n, needs_gradient=False)
    assert nothing is None and torch.equal(logits_nV, before_nV) and losses_n.dtype == torch.float32
    assert_near(losses_n, expected_n)
    losses_n, gradient_nV = cross_entropy_and_gradient(logits_nV, target_n)
    assert gradient_nV is logits_nV and gradient_nV.dtype == dtype
    assert_near(losses_n, expected_n)
    assert_near(gradient_nV, of_expected_nV)


@dtypes
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 48])
def test_cross_entropy(vocabulary, dtype):
    target_n = torch.tensor([0, vocabulary - 1, vocabulary // 2, min(15, vocabulary - 1), min(16, vocabulary - 1)])
    logits_nV = 3 * random(5, vocabulary, dtype=dtype)
    if vocabulary == 1:  # both are zero
        losses_n, gradient_nV = cross_entropy_and_gradient(logits_nV, target_n)
        assert losses_n.eq(0).all() and gradient_nV.eq(0).all()
    else:
        assert_losses_and_gradient(logits_nV, target_n)


def test_rows_apart():
    """The logits are a part of wider rows, whose other columns do not change."""
    wide_nW = random(4, 50)
    before_nW = wide_nW.clone()
    assert_losses_and_gradient(wide_nW[:, 5:42], torch.tensor([0, 36, 15, 16]))
    assert torch.equal(wide_nW[:, :5], before_nW[:, :5]) and torch.equal(wide_nW[:, 42:], before_nW[:, 42:])


def test_columns_apart(monkeypatch):
    monkeypatch.setattr(cross_entropy, "plain_cross_entropy_and_gradient", plain_cross_entropy_and_gradient)
    logits_nV, target_n = random(37, 4).t(), torch.tensor([0, 36, 15, 16])
    expected_n = F.cross_entropy(logits_nV.double(), target_n, reduction="none")
    assert_near(cross_entropy_and_gradient(logits_nV, target_n)[0], expected_n)


@pytest.mark.parametrize("shift", [1e4, -1e4, 1e30])
def test_extreme_logits(shift):
    logits_nV = random(4, 40)
    logits_nV[1, :20] += shift
    logits_nV[2] *= abs(shift)
    logits_nV[3] += shift
    assert_losses_and_gradient(logits_nV, torch.tensor([3, 30, int(logits_nV[2].argmax()), 39]))


def test_excluded_tokens():
    """Whole blocks of logits are -inf, at the beginning and at the end."""
    logits_nV = random(4, 64)
    logits_nV[0, :40] = logits_nV[1, 10:] = -float("inf")
    logits_nV[2, 1:] = logits_nV[3, :63] = -float("inf")
    assert_losses_and_gradient(logits_nV, torch.tensor([50, 9, 0, 63]))


def test_an_impossible_target():
    logits_nV = random(1, 40)
    logits_nV[0, 7] = -float("inf")
    losses_n, gradient_nV = cross_entropy_and_gradient(logits_nV, torch.tensor([7]))
    assert losses_n.tolist() == [float("inf")]
    assert gradient_nV[0, 7] == -1 and abs(gradient_nV.sum()) < 1e-6
