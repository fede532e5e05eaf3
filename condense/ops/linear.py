"""Linear maps: their weights' gradients are summed in float32, and oneDNN computes larger float32 products on a CPU.

The modules are torch's own `nn.Linear`: libraries that quantize, convert or count modules look for exactly this type.

torch computes float32 products with MKL. oneDNN, which torch also contains, was faster for them on the processor that
we measured (docs/results/products), especially for the few rows of a segment.

Axes: x any size, I and O input and output widths.
"""

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .shared_weights import product_dtype, summed_linear, sums_of
from .transforms import is_plain, is_transformed

ONEDNN_MULTIPLICATIONS = 2**26  # from here on oneDNN is faster: docs/results/products
HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and platform.machine() in ("x86_64", "AMD64")
)


def apply_linear(module: Callable[[torch.Tensor], torch.Tensor], input_xI: torch.Tensor) -> torch.Tensor:
    """Returns `module(input_xI)`, the product of a linear map computed by `linear`. Another module may be in the place
    of a linear map, such as an adapter or a quantized map: it has products of its own."""
    if is_plain(module, nn.Linear):
        return linear(input_xI, module.weight, module.bias)
    if type(module) is not nn.Linear or is_transformed():
        return module(input_xI)
    with _OwnProducts():  # its hooks must be called
        return module(input_xI)


class _OwnProducts(TorchFunctionMode):
    """Computes `F.linear` by `linear`."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        return (linear if function is F.linear else function)(*arguments, **options or {})


def linear(input_xI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    dtype = product_dtype(input_xI, weight_OI)
    if (sums := sums_of(weight_OI, dtype=dtype)) is not None:
        return summed_linear(sums, input_xI, weight_OI, bias_O, dtype)
    if _takes_onednn(input_xI, weight_OI):
        return onednn_linear(input_xI, weight_OI, bias_O)
    return F.linear(input_xI, weight_OI, bias_O)


def _takes_onednn(input_xI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Returns whether the product is large and its tensors are plain: nothing watches or transforms them, such as modes
    that count or fake operations, autocast, torch.compile, torch.func, or forward derivatives."""
    if not HAS_ONEDNN or input_xI.numel() * len(weight_OI) < ONEDNN_MULTIPLICATIONS:
        return False
    plain = type(input_xI) is torch.Tensor and type(weight_OI) in (nn.Parameter, torch.Tensor)
    watched = torch.is_autocast_enabled("cpu") or is_in_torch_dispatch_mode() or is_transformed()
    on_cpu = input_xI.device.type == "cpu" and input_xI.dtype == weight_OI.dtype == torch.float32
    return plain and on_cpu and not watched and torch._C._get_mkldnn_enabled()


def onednn_linear(input_xI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Works as `F.linear`, for plain float32 tensors on a CPU."""
    return _Linear.apply(input_xI, weight_OI, bias_O)


def _onednn(input_xI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(input_xI, weight_OI, bias_O, "none", [], "")


class _Linear(torch.autograd.Function):
    """Works as `F.linear`. MKL computes the weight's gradient: oneDNN would first copy data to read it by columns."""

    @staticmethod
    def forward(ctx, input_xI, weight_OI, bias_O):
        of_weight = ctx.needs_input_grad[1]  # beside adapters, frozen weights need no inputs
        ctx.save_for_backward(input_xI if of_weight else None, weight_OI)
        return _onednn(input_xI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, gradient_xO):
        input_xI, weight_OI = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            # Its own gradient, for second derivatives, is the gradient of a linear map.
            of_input = _Linear.apply(gradient_xO, weight_OI.t(), None)
        if ctx.needs_input_grad[1]:
            of_weight = _rows(gradient_xO).t() @ _rows(input_xI)
        if ctx.needs_input_grad[2]:
            of_bias = _rows(gradient_xO).sum(0)
        return of_input, of_weight, of_bias


def _rows(tensor_xI: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as a matrix [n, I]."""
    return tensor_xI.reshape(-1, tensor_xI.shape[-1])
