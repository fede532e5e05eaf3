"""What GPUs can compute at most: the denominator of the share of the peak that a run reaches (MFU)."""

import re

# Dense bfloat16 multiplications and additions in a second, by words of the name that torch gives; the first row counts.
# From NVIDIA's data sheets, whose figures "with sparsity" are halved.
PEAK_FLOPS = (
    (("H100", "PCIe"), 756e12),
    (("H800", "PCIe"), 756e12),
    (("H100", "NVL"), 835e12),
    (("H200", "NVL"), 835e12),
    (("H100",), 989e12),
    (("H200",), 989e12),
    (("H800",), 989e12),
    (("GH200",), 989e12),
    (("B200",), 2250e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("A40",), 149.7e12),
    (("A30",), 165e12),
    (("L40S",), 362e12),
    (("L40",), 181e12),
    (("L4",), 121e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations in a second of the GPU that `torch.cuda.get_device_name` names; None if unknown."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:  # a part of a GPU
        return None
    return next((flops for wanted, flops in PEAK_FLOPS if words.issuperset(wanted)), None)
