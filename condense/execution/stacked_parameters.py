"""The parameters of several layers as stacks that share their memory.

On CUDA, weights that have an input in common lie side by side in each layer, so that one product computes them all.

Axes: M layers of a model, m consecutive ones of them, x the axes of a parameter.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from ..ops.shared_weights import Begun, sums_of
from ..ops.transforms import join

JOINED = (
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
)
JOINING_DEVICES = ("cuda",)  # on a CPU fewer products are not faster: docs/speed.md


def stacked_parameters(layers: nn.ModuleList) -> dict[str, "StackedParameter"]:
    """Returns stacks of all layers' parameters by their names in a layer. Moves parameters; see `_common_memory`."""
    parameters = {name: [layer.get_parameter(name) for layer in layers] for name, _ in layers[0].named_parameters()}
    stacks: dict[str, StackedParameter] = {}
    for names in JOINED:
        members = [parameters[name] for name in names if name in parameters]
        if len(members) < len(names) or not _may_be_joined(members):
            continue
        try:
            memory = _common_memory(list(zip(*members, strict=True)))
        except torch.OutOfMemoryError:  # one after the other they may fit
            memory = None
        if memory is None:
            continue
        sizes = [len(weights[0]) for weights in members]
        for name, weights, end, size in zip(names, members, accumulate(sizes), sizes, strict=True):
            stacks[name] = StackedParameter(weights, memory[:, end - size : end])
    for name, weights in parameters.items():
        if name not in stacks:
            stacks[name] = StackedParameter(weights, _common_memory([(weight,) for weight in weights]))
    return stacks


def _may_be_joined(members: Sequence[Sequence[nn.Parameter]]) -> bool:
    kinds = {(weights[0].shape[1:], weights[0].dtype, weights[0].device) for weights in members}
    return len(kinds) == 1 and members[0][0].device.type in JOINING_DEVICES


def _common_memory(members: Sequence[Sequence[nn.Parameter]]) -> torch.Tensor | None:
    """Returns the parameters as one tensor [M, ...] that shares their memory, each member's parameters side by side;
    None if they are apart and can't be moved.

    A parameter that fills its storage is moved, and gets its own storage over its part of the common memory, so that
    code which saves or shares parameters by storage sees each one separately. A parameter in a larger storage (ZeRO),
    or shared with other processes, must not be moved.
    """
    first = members[0][0]
    rows = sum(len(parameter) for parameter in members[0])
    if (distance := _distance(members)) is not None:
        return first.detach().as_strided((len(members), rows, *first.shape[1:]), (distance, *first.stride()))
    parameters: list[torch.Tensor] = [parameter for member in members for parameter in member]
    for parameter in parameters:
        fills = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        shared = parameter.device.type == "cpu" and parameter.is_shared()
        if not fills or shared or not parameter.is_contiguous():
            return None
    with torch.inference_mode(False), torch.no_grad():
        together = join(parameters)
        parts = together.split([len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part if part.is_meta else torch.from_dlpack(part)
    return together.view(len(members), rows, *first.shape[1:])


def _distance(members: Sequence[Sequence[torch.Tensor]]) -> int | None:
    """Returns the number of elements from each member to the next in their common storage; None if it varies, or if
    the parameters of a member do not follow one another."""
    first, size = members[0][0], sum(parameter.numel() for parameter in members[0])
    distance = size if len(members) == 1 else members[1][0].storage_offset() - first.storage_offset()
    for number, member in enumerate(members):
        offset = first.storage_offset() + number * distance
        for parameter in member:
            same_storage = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not same_storage or parameter.storage_offset() != offset or parameter.stride() != first.stride():
                return None
            if len(member) > 1 and not parameter.is_contiguous():
                return None
            offset += parameter.numel()
    return int(distance) if distance >= size else None


class StackedParameter:
    """A parameter of M layers; `tensor_Mx` is the stack that shares their memory, None if they are apart."""

    def __init__(self, parameters: Sequence[nn.Parameter], tensor_Mx: torch.Tensor | None):
        self.all, self.tensor_Mx = list(parameters), tensor_Mx

    def part(self, layers: slice) -> torch.Tensor:
        """Returns the parameters of some layers [m, ...], which must not be apart, differentiable with respect to the
        parameters."""
        assert self.tensor_Mx is not None
        part_mx = self.tensor_Mx[layers]
        return _SharedStack.apply(part_mx, *self.all[layers]) if torch.is_grad_enabled() else part_mx

    def leaf(self, layers: slice) -> torch.Tensor:
        """Returns the same for uses whose gradients are all summed: autograd does not reach the parameters."""
        assert self.tensor_Mx is not None
        return self.tensor_Mx[layers].detach().requires_grad_()


def sums_by_name(parameters: Mapping[str, StackedParameter]) -> dict[str, Begun]:
    """Returns the active sums of a call for parameters that are trained, not apart, and summed in float32."""
    together = {name: one.all for name, one in parameters.items() if one.tensor_Mx is not None}
    found = {name: (sums_of(*weights), weights) for name, weights in together.items()}
    return {name: sums.begin(weights, is_stack=True) for name, (sums, weights) in found.items() if sums is not None}


class _SharedStack(torch.autograd.Function):
    """The stack [m, ...] that shares memory with the parameters: its gradients are theirs."""

    @staticmethod
    def forward(ctx, stack, *parameters):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*parameters)  # autograd then notices a parameter that changes before the backward pass
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx, gradient):
        parameters = ctx.saved_tensors
        return None, *([None] * len(parameters) if gradient is None else gradient.unbind(0))
