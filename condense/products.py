"""Products that are added to a sum in place.

On CUDA a product in half precision adds to a sum in float32 itself: there is no other matrix of its shape, and one
operation instead of two. It is an operation of torch's own registry, so that modes which count or record operations
see one, on the meta device too.

Axes: m matrices, O and I output and input widths, n what is summed over.
"""

import torch

_library = torch.library.Library("condense", "DEF")  # lives as long as the module: so do its operations
_library.define("add_products_(Tensor(a!) total, Tensor left, Tensor right) -> ()")


def add_product(total_OI: torch.Tensor, left_On: torch.Tensor, right_nI: torch.Tensor) -> None:
    """total += left @ right; the sum may be in float32 while the product is of lower precision."""
    add_products(total_OI[None], left_On[None], right_nI[None])


def add_products(total_mOI: torch.Tensor, left_mOn: torch.Tensor, right_mnI: torch.Tensor) -> None:
    """As `add_product`, of m matrices each."""
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
