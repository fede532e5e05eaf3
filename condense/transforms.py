"""The ways in which torch changes a computation: transformations of its operations, and autocast."""

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Returns whether torch.compile, torch.func or forward derivatives are active. A computation must then consist of
    operations that torch knows."""
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_in_torch_func()


def is_in_torch_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast computes products in on a device; None if it is off."""
    active = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if active else None
