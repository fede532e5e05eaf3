"""Several layers as one module, whose rows are [layer, row].

The layers' own code runs unchanged; only the modules with weights are replaced: a product with one weight becomes a
batched product with a stack of weights. The stack and the parameters share memory, and parameters keep their names.

Axes: M layers of a model, m layers of a band, R rows of a chunk, T tokens of a chunk, I and O input and output widths
of a linear map, D hidden size, x rows and tokens together.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.layout import NEW, Places, Rows
from ..kernels.rms_norm import add_rms_norm, input_and_rms_norm, takes_norm_kernel
from ..layers import (
    MLP,
    CondenseAttention,
    CondenseDecoderLayer,
    MemoryShare,
    RMSNorm,
    blend,
    is_one_operation,
    llama_rms_norm,
)
from ..linear import apply_linear
from ..products import stacked_products
from ..shared_weights import active_weights, product_dtype, summed_products, sums_of
from ..transforms import has_hooks, is_in_torch_func
from .stacked_parameters import StackedParameter, stacked_parameters

CONTAINERS = (CondenseDecoderLayer, CondenseAttention, MLP)  # modules whose code treats rows independently
_stacking = threading.Lock()
PLAIN = (bool, int, float, str, type(None))  # settings to compare by value
REMEDY = "set schedule='sequential' (or 'auto')"


class Stack:
    """The layers of a model; `band` returns consecutive ones as one module. See `stack_of`."""

    def __init__(self, layers: nn.ModuleList):
        self.layers = list(layers)
        self.parameters = stacked_parameters(layers)
        self.arrangement = _arrangement(layers)
        self.is_apart = any(one.tensor_mx is None for one in self.parameters.values())
        self.is_trained = all(weight.requires_grad for one in self.parameters.values() for weight in one.all)
        self._bands: dict[tuple[int, int, bool], nn.Module] = {}

    def band(self, first: int, end: int) -> nn.Module:
        """Returns layers first ... end - 1 as one; its input [m * R, T, D] holds the rows layer by layer."""
        key = first, end, self.layers[0].training
        with _stacking:
            if key not in self._bands:
                self._bands[key] = self._together(list(self.layers[first:end]), first, "")
            return self._bands[key]

    def _together(self, modules: list[Any], first: int, prefix: str) -> nn.Module:
        """One module for several similar modules: the code of the first, over stacked weights."""
        if (stacked := STACKED.get(type(modules[0]))) is not None:
            names, members = [name for name, _ in modules[0].named_parameters()], slice(first, first + len(modules))
            return stacked(modules, {name: self.parameters[f"{prefix}{name}"].of(members) for name in names})
        together = copy.copy(modules[0])
        together._modules = {
            name: self._together([module.get_submodule(name) for module in modules], first, f"{prefix}{name}.")
            for name, _ in modules[0].named_children()
        }
        return together

    def __reduce__(self):
        return type(None), ()  # a copied model makes its own stack


def stack_of(layers: nn.ModuleList) -> Stack:
    """Returns the layers' stack, or a new one if modules, their settings, hooks or parameters have changed.

    Moves parameters that have separate storages into a common one. Raises `ValueError` as `check_stackable` does.
    """
    with _stacking:  # threads may share a model, and a new stack moves its parameters
        stack = _current_stack(layers)
        if stack is None:
            _check_alike(layers)
            stack = layers.__dict__["_stack"] = Stack(layers)
        return stack


def has_stack(layers: nn.ModuleList) -> bool:
    """Returns whether the layers have been stacked before; they may have changed since."""
    return "_stack" in layers.__dict__


def _current_stack(layers: nn.ModuleList) -> Stack | None:
    stack = layers.__dict__.get("_stack")  # it lives as long as the layers
    return stack if stack is not None and stack.arrangement == _arrangement(layers) else None


def is_stackable(layers: nn.ModuleList) -> bool:
    """Returns whether `stack_of` accepts the layers; changes nothing."""
    try:
        check_stackable(layers)
    except ValueError:
        return False
    return True


def check_stackable(layers: nn.ModuleList) -> None:
    """Raises `ValueError` if calling the layers together might differ from calling each on its own; changes nothing."""
    if is_in_torch_func():
        raise ValueError(f"torch.func can't transform the stacked weights of a wavefront: {REMEDY}.")
    if _current_stack(layers) is None:
        _check_alike(layers)


def _check_alike(layers: nn.ModuleList) -> None:
    alike = [_described(module) for module in layers[0].modules()]
    parameters = [id(parameter) for layer in layers for parameter in layer.parameters()]
    if len(set(parameters)) < len(parameters):
        raise ValueError(f"layers share parameters, and a wavefront stacks the parameters of each: {REMEDY}.")
    for number, layer in enumerate(layers):
        if [name for name, _ in layer.named_modules()] != [name for name, _ in layers[0].named_modules()]:
            raise ValueError(
                f"layer {number} has different modules from layer 0, but a wavefront runs them as one: {REMEDY}."
            )
        for (name, module), (_, first), expected in zip(
            layer.named_modules(), layers[0].named_modules(), alike, strict=True
        ):
            where = f"layer {number} at {name or 'its top'!r}"
            _check_module(module, where)
            if _described(module) != expected:
                raise ValueError(
                    f"{where} has different settings from layer 0, but a wavefront runs them as one: {REMEDY}."
                )
            _check_parameters(module, first, where)


def _check_module(module: nn.Module, where: str) -> None:
    if has_hooks(module) or "forward" in module.__dict__:
        raise ValueError(f"{where} has hooks or a forward of its own; a wavefront calls many layers at once: {REMEDY}.")
    leaf = type(module) in STACKED
    holds = any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
    known = leaf or (not holds and (type(module) in CONTAINERS or not module._modules))
    if not known or module._buffers:
        raise ValueError(
            f"{where} is a {type(module).__name__}, which a wavefront cannot stack: {REMEDY}, or if it is an adapter, "
            "merge it into the model first."
        )
    if leaf and module._parameters and not isinstance(module._parameters.get("weight"), torch.Tensor):
        raise ValueError(f"{where} has no weight of its own (a replica, or kept elsewhere): {REMEDY}.")


def _check_parameters(module: nn.Module, first: nn.Module, where: str) -> None:
    for name, parameter in module._parameters.items():
        other = first._parameters.get(name)
        if parameter is None and other is None:
            continue
        if type(parameter) is not nn.Parameter or type(other) is not nn.Parameter or parameter.is_inference():
            raise ValueError(f"{name} of {where} is not a plain parameter that can be moved: {REMEDY}.")
        if parameter.numel() == 0:
            raise ValueError(f"{name} of {where} is kept elsewhere (ZeRO-3, FSDP): {REMEDY}.")
        if (parameter.shape, parameter.dtype, parameter.device) != (other.shape, other.dtype, other.device):
            raise ValueError(
                f"{name} of {where} is {tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}, of layer 0 "
                f"{tuple(other.shape)}, {other.dtype} on {other.device}; a wavefront runs layers that are alike and on "
                f"one device: {REMEDY}."
            )


def _described(module: nn.Module) -> tuple:
    """A module's type, its parameters' names and its settings: numbers and names by value, others by identity."""
    own = VARYING_SETTINGS.get(type(module), ())
    public = ((name, value) for name, value in module.__dict__.items() if not name.startswith("_"))
    settings = sorted((name, value) for name, value in public if name not in own)
    described = [(name, value if isinstance(value, PLAIN) else id(value)) for name, value in settings]
    return type(module), list(module._parameters), list(module._buffers), described


def _arrangement(layers: nn.ModuleList) -> list[Any]:
    """Everything that a stack depends on, except whether it trains.

    The order is the same as in `layers.modules()`, at ten times the speed, because every call of the model uses it.
    """
    found: list[Any] = []
    modules: list[nn.Module] = [layers]
    for module in modules:
        state = module.__dict__
        found += (id(module), has_hooks(module), module.training == layers.training)
        found += [
            value if type(value) in PLAIN else id(value)
            for name, value in state.items()
            if name[0] != "_" and name != "training"
        ]
        for one in state["_parameters"].values():
            if type(one) is nn.Parameter:
                found += (id(one), one.data_ptr(), one.dtype, one.requires_grad)
        found += map(id, state["_buffers"].values())
        modules += [child for child in state["_modules"].values() if child is not None]
    return found


class _Stacked(nn.Module):
    """m modules as one."""

    def __init__(self, modules: Sequence[Any], parameters: dict[str, StackedParameter]):
        super().__init__()
        self.stacked = list(modules)  # a plain list: these modules are registered elsewhere
        self.stacked_parameters = parameters


class StackedLinear(_Stacked):
    """m linear maps, [m * R, T, I] to [m * R, T, O]: one batched product, or m products if the weights are apart."""

    @staticmethod
    def joint(linears: Sequence["StackedLinear"], input_RTI: torch.Tensor) -> list[torch.Tensor]:
        """Returns the outputs of several maps of the same layers and input."""
        weights = [linear.stacked_parameters["weight"] for linear in linears]
        if any(weight.tensor_mx is None for weight in weights):
            return [linear.one_by_one(input_RTI) for linear in linears]
        input_mnI = input_RTI.reshape(len(linears[0].stacked), -1, input_RTI.shape[-1])
        dtype = input_RTI.dtype
        casts = any(one.all[0].dtype != dtype or product_dtype(input_RTI, one.all[0]) != dtype for one in weights)
        found = [None if casts else sums_of(*weight.all) for weight in weights]  # None for weights that are frozen, too
        summed = [(weight.shared(sums), weight.all) for weight, sums in zip(weights, found, strict=True) if sums]
        if not torch.is_grad_enabled():
            outputs = stacked_products(input_mnI, [weight.shared() for weight in weights])
        else:
            sums = next(filter(None, found), None)
            joint = iter(summed_products(sums, input_mnI, summed, weights[0].members) if sums else ())
            outputs = [
                next(joint) if one else torch.bmm(input_mnI, weight.shared().transpose(1, 2))
                for weight, one in zip(weights, found, strict=True)
            ]
        return [linear.with_bias(output_mnO, input_RTI) for linear, output_mnO in zip(linears, outputs, strict=True)]

    def rows(self, like_RTx: torch.Tensor, of_gradients: bool) -> Rows | None:
        """Returns the memory to write an input [R, T, I] to, or the gradients of the outputs of this map and of those
        with the same input; None for a new tensor."""
        weight, sums = self.stacked_parameters["weight"], active_weights()
        if sums is None or weight.tensor_mx is None:
            return None
        return sums.rows(weight.all, weight.members, like_RTx, of_gradients)

    def with_bias(self, output_mnO: torch.Tensor, input_RTI: torch.Tensor) -> torch.Tensor:
        if (bias := self.stacked_parameters.get("bias")) is not None:
            output_mnO = output_mnO + bias.stack()[:, None].to(output_mnO.dtype)  # they differ under autocast
        return output_mnO.view(*input_RTI.shape[:2], -1)

    def one_by_one(self, input_RTI: torch.Tensor) -> torch.Tensor:
        parts = input_RTI.unflatten(0, (len(self.stacked), -1))
        return torch.cat([apply_linear(module, part_RTI) for module, part_RTI in zip(self.stacked, parts, strict=True)])


class StackedNorm(_Stacked):
    """m norms over [m * R, ..., D], as a single norm with a weight [m, 1, ..., D]."""

    def forward(self, hidden_RxD: torch.Tensor) -> torch.Tensor:
        return self.after_input(hidden_RxD)[1]

    def after_input(self, hidden_RxD: torch.Tensor, places: Places = NEW) -> tuple[torch.Tensor, torch.Tensor]:
        if takes_norm_kernel(hidden_RxD, self.stacked[0].weight):
            return input_and_rms_norm(hidden_RxD, *self._for_kernel(places))
        weight_mD = self.stacked_parameters["weight"].stack()
        weight_m1D = weight_mD.view(len(weight_mD), *[1] * (hidden_RxD.dim() - 1), -1)
        return hidden_RxD, self.normalize(hidden_RxD.unflatten(0, (len(weight_mD), -1)), weight_m1D).flatten(0, 1)

    def after_sum(
        self, hidden_RxD: torch.Tensor, residual_RxD: torch.Tensor, places: Places = NEW
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if takes_norm_kernel(hidden_RxD, self.stacked[0].weight):
            return add_rms_norm(hidden_RxD, residual_RxD, *self._for_kernel(places))
        return self.after_input(hidden_RxD + residual_RxD)

    def _for_kernel(self, places: Places) -> tuple[torch.Tensor, float, Places]:
        """Returns weights, epsilon and places: if the kernel adds to a sum, the weights receive no gradient."""
        weight, epsilon = self.stacked_parameters["weight"], self.stacked[0].variance_epsilon
        sums = sums_of(*weight.all)
        if sums is None or (partial_sums := sums.partial_sums(weight.all, weight.members)) is None:
            return weight.stack(), epsilon, places
        return weight.shared(sums), epsilon, replace(places, of_weight=partial_sums)

    def normalize(self, hidden_mRxD: torch.Tensor, weight_m1D: torch.Tensor) -> torch.Tensor:
        if is_one_operation(hidden_mRxD):
            return self.fused(hidden_mRxD, weight_m1D)
        return llama_rms_norm(hidden_mRxD, weight_m1D, self.stacked[0].variance_epsilon)

    def fused(self, hidden_mRxD: torch.Tensor, weight_m1D: torch.Tensor) -> torch.Tensor:
        epsilon = self.stacked[0].variance_epsilon
        return weight_m1D * F.rms_norm(hidden_mRxD, hidden_mRxD.shape[-1:], None, epsilon)


class StackedMemoryShare(_Stacked):
    """m shares over [m * R, T, D]; layers with equal shares are blended together."""

    @property
    def takes_input(self) -> bool:
        return all(module.takes_input for module in self.stacked)

    @property
    def takes_output(self) -> bool:
        return all(module.takes_output for module in self.stacked)

    def forward(self, input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        num_rows = len(input_RTD) // len(self.stacked)
        runs = [(share, len(list(run)) * num_rows) for share, run in groupby(module.share for module in self.stacked)]
        if len(runs) == 1:
            return blend(input_RTD, output_RTD, runs[0][0])
        parts = (tensor.split([rows for _, rows in runs]) for tensor in (input_RTD, output_RTD))
        return torch.cat(
            [blend(inputs, outputs, share) for inputs, outputs, (share, _) in zip(*parts, runs, strict=True)]
        )


STACKED = {
    nn.Linear: StackedLinear,
    RMSNorm: StackedNorm,
    MemoryShare: StackedMemoryShare,
}
VARYING_SETTINGS: dict[type, tuple[str, ...]] = {MemoryShare: ("share",)}  # in which layers of a stack may differ
