"""What a run says before it begins."""

import pytest
import torch

from condense.training.preflight import warn_if_slow

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("dtype", "has_gpu", "is_supported", "warns"),
    [
        ("bfloat16", False, False, True),
        ("bfloat16", False, True, False),
        ("bfloat16", True, False, False),
        ("float32", False, False, False),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it(monkeypatch, said, dtype, has_gpu, is_supported, warns):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_supported)
    for _ in range(2):
        warn_if_slow(dtype)
    assert len(said()) == warns
    assert not warns or "ten times slower than in float32, or worse; set dtype=float32." in said()[0]


def test_torch_says_what_the_cpu_has():
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)
