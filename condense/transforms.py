"""Checks whether torch transforms a computation, which must then consist of operations that torch knows."""

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Returns whether torch.compile, torch.func or forward derivatives are active."""
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
