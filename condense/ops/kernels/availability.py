"""Whether an operation runs as a Triton kernel."""

import logging
import os
from functools import cache

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..transforms import is_transformed

logger = logging.getLogger(__name__)

CAPABILITY = (8, 0)  # bfloat16 in hardware
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.bfloat16, torch.float32)}


def uses_kernels(tensor: torch.Tensor) -> bool:
    """Returns whether kernels can process this tensor: a plain tensor with elements, on a GPU that Triton supports or,
    in Triton's interpreter (TRITON_INTERPRET=1), on the CPU; and nothing watches or transforms the operations."""
    if is_transformed() or type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    device, dtype = tensor.device, tensor.dtype
    if device.type not in DTYPES or not dtype.is_floating_point or tensor.numel() == 0 or is_in_torch_dispatch_mode():
        return False
    if device.type == "cpu":
        return dtype in DTYPES["cpu"] and os.environ.get("TRITON_INTERPRET") == "1" and has_triton()
    return _is_supported(device.index) and _has_kernels(dtype)


@cache
def has_triton() -> bool:
    try:
        import triton.language  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _has_kernels(dtype: torch.dtype) -> bool:
    """Logs once for each dtype that it does not have kernels on a GPU."""
    if dtype not in DTYPES["cuda"]:
        logger.warning("Fused kernels do not support %s: using plain operations instead.", dtype)
    return dtype in DTYPES["cuda"]


@cache
def _is_supported(index: int) -> bool:
    """Logs once for each GPU why it does not have kernels."""
    if not has_triton():
        logger.warning("Triton can't be imported: using plain operations instead of fused kernels.")
        return False
    if torch.cuda.get_device_capability(index) < CAPABILITY:
        name = torch.cuda.get_device_name(index)
        logger.warning("%s is too old for the fused kernels: using plain operations instead.", name)
        return False
    return True
