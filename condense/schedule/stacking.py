"""Several layers as one, whose rows are [layer, row]: what a layer computes row by row stays its own code.

Only the leaves that hold weights differ: a product with one weight becomes a batched product with a
stack of them. The stack is a view of the parameters, which lie in one storage at even distances; they
keep their names, and no second copy exists.

Axes: n layers of a band, R rows, T tokens, I and O the widths of a product, D model width.
"""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import RMSNorm


class Stack:
    """The layers of a model, any consecutive ones of which can be had as one: see `stack_of`."""

    def __init__(self, layers: nn.ModuleList):
        self.layers = list(layers)
        self._bands: dict[tuple[int, int], nn.Module] = {}
        for name, _ in layers[0].named_parameters():
            _bring_together([layer.get_parameter(name) for layer in layers])
        self.arrangement = _arrangement(layers)

    def band(self, first: int, end: int) -> nn.Module:
        """Layers first ... end - 1; its input is theirs [n * R, T, D], one layer's rows after the other's."""
        if (first, end) not in self._bands:
            self._bands[first, end] = _band(self.layers[first:end])
        return self._bands[first, end]

    def __reduce__(self):
        return type(None), ()  # a copy of the model makes its own


def stack_of(layers: nn.ModuleList) -> Stack:
    """The layers' stack, made anew when modules, hooks or parameters are no longer the same.

    Moves parameters that have a storage each into a common one. Raises `ValueError` as `check_stackable`.
    """
    stack = layers.__dict__.get("_stack")  # which lives as long as they do
    if stack is None or stack.arrangement != _arrangement(layers):
        check_stackable(layers)
        stack = layers.__dict__["_stack"] = Stack(layers)
    return stack


def _arrangement(layers: nn.ModuleList) -> list[tuple]:
    modules: list[tuple] = [(id(module), module.training, _has_hooks(module)) for module in layers.modules()]
    return modules + [(id(parameter), parameter.data_ptr(), parameter.dtype) for parameter in layers.parameters()]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def check_stackable(layers: nn.ModuleList) -> None:
    """Raises `ValueError` where calling the layers together would not be what calling each does."""
    remedy = "set schedule='sequential' (or 'auto')"
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if _has_hooks(module):
                raise ValueError(
                    f"layer {number} has hooks at {name or 'itself'!r}, and a wavefront calls many layers at once: "
                    f"{remedy}."
                )
            leaf = not next(module.children(), None)
            if leaf and next(module.parameters(), None) is not None and type(module) not in _STACKED:
                raise ValueError(
                    f"layer {number} has a {type(module).__name__} at {name!r}, of which a wavefront knows no stack: "
                    f"{remedy}, or merge the adapter into the model first."
                )
        for name, parameter in layer.named_parameters():
            first = layers[0].get_parameter(name)
            if (parameter.shape, parameter.dtype, parameter.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"{name} of layer {number} is {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}, "
                    f"of layer 0 {tuple(first.shape)}, {first.dtype} on {first.device}; a wavefront runs layers that "
                    f"are alike and on one device: {remedy}."
                )
            if parameter.numel() == 0:
                raise ValueError(f"{name} of layer {number} is kept elsewhere (ZeRO-3, FSDP): {remedy}.")


def _bring_together(parameters: list[nn.Parameter]) -> None:
    """Into one storage, unless a storage holds more than its parameter: then it is someone else's to arrange."""
    if _distance(parameters) is not None:
        return
    if any(p.untyped_storage().nbytes() != p.numel() * p.element_size() or not p.is_contiguous() for p in parameters):
        return
    with torch.inference_mode(False), torch.no_grad():
        for parameter, place in zip(parameters, torch.stack(list(parameters)), strict=True):
            parameter.data = place


def _distance(tensors: Sequence[torch.Tensor]) -> int | None:
    """Elements from each tensor to the next in their common storage; None where there is no such number."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.numel()
    distance = int(tensors[1].storage_offset() - first.storage_offset())
    even = all(
        tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.storage_offset() == first.storage_offset() + n * distance
        and tensor.stride() == first.stride()
        for n, tensor in enumerate(tensors)
    )
    return distance if even and distance >= first.numel() else None


class _View(torch.autograd.Function):
    """Tensors at even distances of a storage as one [n, ...], without a copy."""

    @staticmethod
    def forward(ctx, distance, *tensors):
        first = tensors[0]
        return first.detach().as_strided((len(tensors), *first.shape), (distance, *first.stride()))

    @staticmethod
    def backward(ctx, gradient):
        return None, *gradient.unbind(0)


class StackedLinear(nn.Module):
    """n linear maps, [n * R, T, I] to [n * R, T, O]: one product, or one each where weights lie unevenly."""

    def __init__(self, linears: list[nn.Linear]):
        super().__init__()
        self.linears = linears  # a plain list: these modules are registered elsewhere
        self.weights = [linear.weight for linear in linears]
        self.distance = _distance(self.weights)

    def forward(self, input_RTI: torch.Tensor) -> torch.Tensor:
        input_nRTI = input_RTI.unflatten(0, (len(self.linears), -1))
        if self.distance is None:
            parts = [F.linear(part, one.weight, one.bias) for part, one in zip(input_nRTI, self.linears, strict=True)]
            return torch.cat(parts)
        weight_nOI = _View.apply(self.distance, *self.weights)
        output_nxO = torch.bmm(input_nRTI.flatten(1, 2), weight_nOI.transpose(1, 2))
        if self.linears[0].bias is not None:
            output_nxO = output_nxO + torch.stack([linear.bias for linear in self.linears])[:, None]
        return output_nxO.unflatten(1, input_nRTI.shape[1:3]).flatten(0, 1)


class StackedNorm(RMSNorm):
    """n norms over [n * R, T, D]: the layers' own, with a weight that has an axis of layers."""

    def __init__(self, norms: list[RMSNorm]):
        nn.Module.__init__(self)
        self.norms = norms
        self.variance_epsilon = norms[0].variance_epsilon

    def forward(self, hidden_RTD: torch.Tensor) -> torch.Tensor:
        self.weight = torch.stack([norm.weight for norm in self.norms])[:, None, None]
        return super().forward(hidden_RTD.unflatten(0, (len(self.norms), -1))).flatten(0, 1)

    def fused(self, hidden_nRTD: torch.Tensor) -> torch.Tensor:
        return self.weight * F.rms_norm(hidden_nRTD, hidden_nRTD.shape[-1:], None, self.variance_epsilon)


_STACKED: dict[type, Callable[[list], nn.Module]] = {nn.Linear: StackedLinear, RMSNorm: StackedNorm}


def _band(modules: list[nn.Module]) -> nn.Module:
    """One module in place of several alike: the first's own code over stacked leaves."""
    first = modules[0]
    if type(first) in _STACKED:
        return _STACKED[type(first)](modules)
    together = copy.copy(first)
    together._modules = {
        name: _band([module.get_submodule(name) for module in modules]) for name, _ in first.named_children()
    }
    return together
