"""Tensors as kernels read and write them.

Axes: x any axes, n the same as one, D the last axis, m parts of a result that may lie apart in memory.
"""

import torch


def given_or_new(given_mnD: torch.Tensor | None, num_rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the memory for a result that a caller has given, or a new tensor [1, n, width]."""
    return like.new_empty(1, num_rows, width) if given_mnD is None else given_mnD


def part_sizes(memory_mnD: torch.Tensor) -> tuple[int, int]:
    """Returns the number of rows of a part, and the distance between parts."""
    assert memory_mnD.stride()[1:] == (memory_mnD.shape[2], 1)
    return memory_mnD.shape[1], memory_mnD.stride(0)


def as_parts(tensor_xD: torch.Tensor) -> torch.Tensor:
    """Returns the rows as [m, n, D], where parts and rows are any distance apart; copies only if there is no such
    view."""
    if tensor_xD.dim() == 3 and tensor_xD.stride(0) != tensor_xD.shape[1] * tensor_xD.stride(1):
        return with_unit_stride(tensor_xD)
    return as_rows(tensor_xD)[None]


def with_unit_stride(tensor_xD: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if the elements of its last axis are apart."""
    return tensor_xD if tensor_xD.stride(-1) == 1 or tensor_xD.shape[-1] == 1 else tensor_xD.contiguous()


def as_rows(tensor_xD: torch.Tensor) -> torch.Tensor:
    """Returns the rows [n, D], any distance apart; copies only if the tensor cannot be viewed that way."""
    return with_unit_stride(tensor_xD.reshape(-1, tensor_xD.shape[-1]))
