"""Products of stacks of matrices, and products that are added to a sum in place.

Weights that lie side by side need only one product with an input, as a single matrix.

On CUDA a product in half precision is added directly to a float32 sum, without a temporary matrix. It is an operation
of torch's own registry, so modes that count or record operations see it, on the meta device too.

Axes: m matrices, O and I output and input widths, n what is summed over.
"""

from collections.abc import Sequence

import torch

_library = torch.library.Library("condense", "DEF")  # lives as long as the module, and so do its operations
_library.define("add_products_(Tensor(a!) total, Tensor left, Tensor right) -> ()")


def side_by_side(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """Returns the tensors as one, if each begins, along an axis, at the end of the one before."""
    first, offset = tensors[0], tensors[0].storage_offset()
    if len({(one.dtype, one.stride(), one.untyped_storage()._cdata) for one in tensors}) > 1:
        return None
    shapes = [list(one.shape) for one in tensors]
    size = sum(shape.pop(dim) for shape in shapes)
    overlaps = dim > 0 and first.shape[dim - 1] > 1 and size * first.stride(dim) > first.stride(dim - 1)
    if overlaps or any(shape != shapes[0] for shape in shapes):
        return None
    for tensor in tensors:
        if tensor.storage_offset() != offset:
            return None
        offset += tensor.shape[dim] * tensor.stride(dim)
    joint = [*first.shape[:dim], size, *first.shape[dim + 1 :]]
    return first.as_strided(joint, first.stride(), first.storage_offset())


def stacked_products(input_mnI: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the products [m, n, O] of an input with stacks of weights [m, O, I], without gradients."""
    joint_mOI = side_by_side(weights, dim=1) if len(weights) > 1 else None
    if joint_mOI is None:
        return [torch.bmm(input_mnI, weight_mOI.transpose(1, 2)) for weight_mOI in weights]
    sizes = [weight_mOI.shape[1] for weight_mOI in weights]
    return list(torch.bmm(input_mnI, joint_mOI.transpose(1, 2)).split(sizes, dim=2))


def add_product(total_OI: torch.Tensor, left_On: torch.Tensor, right_nI: torch.Tensor) -> None:
    """Adds left @ right to total; the sum may be in float32 while the product has a lower precision."""
    add_products(total_OI[None], left_On[None], right_nI[None])


def add_products(total_mOI: torch.Tensor, left_mOn: torch.Tensor, right_mnI: torch.Tensor) -> None:
    """Works as `add_product`, for m matrices each."""
    torch.ops.condense.add_products_(total_mOI, left_mOn, right_mnI)


def _add_products(total_mOI: torch.Tensor, left_mOn: torch.Tensor, right_mnI: torch.Tensor) -> None:
    if left_mOn.dtype == total_mOI.dtype:
        total_mOI.baddbmm_(left_mOn, right_mnI)
    else:
        total_mOI.add_(torch.bmm(left_mOn, right_mnI))


def _add_products_on_cuda(total_mOI: torch.Tensor, left_mOn: torch.Tensor, right_mnI: torch.Tensor) -> None:
    if left_mOn.dtype == total_mOI.dtype or not HAS_OUT_DTYPE:
        _add_products(total_mOI, left_mOn, right_mnI)
    else:
        torch.baddbmm(total_mOI, left_mOn, right_mnI, out_dtype=total_mOI.dtype, out=total_mOI)


HAS_OUT_DTYPE = "dtype_out" in torch.ops.aten.baddbmm.overloads()  # since torch 2.8

_library.impl("add_products_", _add_products, "CPU")
_library.impl("add_products_", _add_products_on_cuda, "CUDA")
_library.impl("add_products_", lambda total_mOI, left_mOn, right_mnI: None, "Meta")
