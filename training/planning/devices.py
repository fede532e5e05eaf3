"""Peak rates of GPUs: the denominator of the share of the peak that a run reaches (MFU)."""

import re

# Dense bfloat16 multiplications and additions in a second, and words of the names that torch gives: the first counts.
# From NVIDIA's data sheets, whose figures "with sparsity" are halved.
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
    """Dense bfloat16 operations in a second of the GPU that `torch.cuda.get_device_name` names; None if unknown."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:  # a part of a GPU
        return None
    known = ((flops, name) for flops, names in PEAK_FLOPS.items() for name in names)
    return next((flops for flops, name in known if words.issuperset(name.split())), None)
