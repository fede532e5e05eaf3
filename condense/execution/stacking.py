"""The layers of a model as a stack, for bands: which layers may be stacked, and when a stack is made again.

A band computes the layers' equations itself (`band`), so each layer must consist of nothing but the modules that it
knows. The stack and the parameters share memory, and parameters keep their names.
"""

import threading
from typing import Any

import torch
from torch import nn

from ..layers import MLP, CondenseAttention, CondenseDecoderLayer, MemoryShare, RMSNorm
from ..ops.transforms import has_hooks, is_in_torch_func
from .stacked_parameters import stacked_parameters

CONTAINERS = (CondenseDecoderLayer, CondenseAttention, MLP)  # modules without weights of their own
LEAVES = (nn.Linear, RMSNorm, MemoryShare)
VARYING_SETTINGS: dict[type, tuple[str, ...]] = {MemoryShare: ("share",)}  # in which layers of a stack may differ
_stacking = threading.Lock()
PLAIN = (bool, int, float, str, type(None))  # settings to compare by value
REMEDY = "set schedule='sequential' (or 'auto')"


class Stack:
    """The layers of a model, and their parameters as stacks. See `stack_of`."""

    def __init__(self, layers: nn.ModuleList):
        self.layers: list[Any] = list(layers)
        self.parameters = stacked_parameters(layers)
        self.arrangement = _arrangement(layers)
        self.is_apart = any(one.tensor_Mx is None for one in self.parameters.values())
        self.is_trained = all(weight.requires_grad for one in self.parameters.values() for weight in one.all)

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
    alike = [_describe(module) for module in layers[0].modules()]
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
            if _describe(module) != expected:
                raise ValueError(
                    f"{where} has different settings from layer 0, but a wavefront runs them as one: {REMEDY}."
                )
            _check_parameters(module, first, where)


def _check_module(module: nn.Module, where: str) -> None:
    if has_hooks(module) or "forward" in module.__dict__:
        raise ValueError(f"{where} has hooks or a forward of its own; a wavefront calls many layers at once: {REMEDY}.")
    leaf = type(module) in LEAVES
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


def _describe(module: nn.Module) -> tuple:
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
