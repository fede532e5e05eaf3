"""The peaks of GPUs by the names that torch gives them."""

import pytest

from condense.training.planning.devices import peak_flops

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40S", 362e12),
        ("Tesla V100-SXM2-16GB", None),  # has no bfloat16
        ("Intel(R) Xeon(R)", None),
    ],
)
def test_the_peak_of_a_device(name, peak):
    assert peak_flops(name) == peak
