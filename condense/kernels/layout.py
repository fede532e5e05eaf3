"""Tensors as kernels read them.

Axes: x any axes, n the same as one, D the last axis.
"""

import torch


def with_unit_stride(tensor_xD: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if the elements of its last axis are apart."""
    return tensor_xD if tensor_xD.stride(-1) == 1 or tensor_xD.shape[-1] == 1 else tensor_xD.contiguous()


def as_rows(tensor_xD: torch.Tensor) -> torch.Tensor:
    """Returns the rows [n, D], any distance apart; copies only if the tensor cannot be viewed that way."""
    return with_unit_stride(tensor_xD.reshape(-1, tensor_xD.shape[-1]))
