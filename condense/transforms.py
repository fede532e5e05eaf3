"""Whether torch transforms a computation, so that it must consist of operations that torch knows."""

import torch
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether torch.compile, torch.func or forward derivatives are at work."""
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
