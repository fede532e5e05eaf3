"""Peak rates of GPUs: the denominator of the share of the peak that a run reaches (MFU)."""

import re

# Dense bfloat16 multiplications and additions a second, and words of torch's names for GPUs; the first match counts.
# From NVIDIA's data sheets; figures "with sparsity" are halved.
PEAK_FLOPS = {
    756e12: ("H100 PCIe", "H800 PCIe"),
    835e12: ("H100 NVL", "H200 NVL"),
    989e12: ("H100", "H200", "H800", "GH200"),
    2250e12: ("B200",),
    312e12: ("A100", "A800"),
    149.7e12: ("A40",),
    165e12: ("A30",),
    362e12: ("L40S",),
    181e12: ("L40",),
    121e12: ("L4",),
}


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bfloat16 operations a second of a GPU, by torch's name for it; None if unknown."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:  # a part of a GPU
        return None
    known = ((flops, name) for flops, names in PEAK_FLOPS.items() for name in names)
    return next((flops for flops, name in known if words.issuperset(name.split())), None)
