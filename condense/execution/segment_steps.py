"""A whole segment through all layers as a function of tensors, forward and with its gradients, captured once a shape.

Inputs are the rotary tables, the segment's hidden states and the memories; all else is part of a capture.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..attention import AttentionMetadata
from ..attention.mask import AttentionMask
from ..memory import Memory
from .cuda_graph import GRAPHS, Graphs
from .executor import run_layers

Tensors = tuple[torch.Tensor, ...]
MAX_STEPS = 8  # kept: each holds the activations of a segment, and with gradients those of the weights, too


class StaticStep:
    """A function of tensors, captured as a graph on buffers of its own."""

    def __init__(self, compute: Callable[[Tensors], Tensors], like: Tensors, graphs: Graphs):
        self.inputs = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in like)
        self.compute = partial(compute, self.inputs)  # kept: it holds tensors that the graph reads
        graphs.warm_up(self.compute, like[0].device)
        self.replay, self.outputs = graphs.capture(self.compute, like[0].device)

    def run(self, given: Tensors) -> Tensors:
        """The outputs, which the next run writes over."""
        torch._foreach_copy_(self.inputs, [tensor.detach() for tensor in given])
        self.replay()
        return self.outputs


class Steps:
    """The static steps of a model's layers, one for each shape, the latest `MAX_STEPS` of them; they hold while the
    weights stay where they are."""

    def __init__(self, layers: nn.ModuleList, graphs: Graphs):
        self.layers, self.graphs = list(layers), graphs
        self.parameters = [parameter for parameter in layers.parameters() if parameter.requires_grad]
        self.arrangement = _arrangement(layers)
        self._steps: OrderedDict[tuple, StaticStep] = OrderedDict()

    def __reduce__(self):
        return type(None), ()  # a copied model captures its own

    def forward(self, metadata: AttentionMetadata, inputs: Tensors) -> Tensors:
        """The output [R, T, D] of the last layer, and the next memories' keys and values layer by layer."""
        with torch.no_grad():
            compute = partial(_forward, self.layers, replace(metadata, detach_R=(False,)))  # without gradients
            given = *rotary_tables_of(metadata), *inputs
            return self._step(("forward",), compute, given).run(given)

    def backward(self, metadata: AttentionMetadata, inputs: Tensors) -> StaticStep:
        """The step from the rotary tables, the inputs of `forward` and the gradients of its outputs to the gradients of
        the inputs and of the parameters."""
        compute = partial(_gradients, self.layers, self.parameters, metadata)
        return self._step(("backward", metadata.detach_R), compute, (*rotary_tables_of(metadata), *inputs))

    def _step(self, kind: tuple, compute: Callable[[Tensors], Tensors], inputs: Tensors) -> StaticStep:
        modes = self.layers[0].training, torch.is_inference_mode_enabled()
        key = *kind, *modes, *((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self._steps:
            self._steps[key] = StaticStep(compute, inputs, self.graphs)
            while len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]


def rotary_tables_of(metadata: AttentionMetadata) -> Tensors:
    return *metadata.rotary, *metadata.memory_rotary


def _forward(
    layers: Sequence[Callable[..., tuple[torch.Tensor, Memory | None]]], metadata: AttentionMetadata, inputs: Tensors
) -> Tensors:
    """Of any segment with a memory; the mask is made within the step."""
    cos, sin, memory_cos, memory_sin, hidden_RTD, *tensors = inputs
    static = replace(
        metadata, rotary=(cos, sin), memory_rotary=(memory_cos, memory_sin), mask=AttentionMask(metadata.chunk),
        writes_memory=True,
    )  # fmt: skip
    hidden_RTD, memories = run_layers(layers, hidden_RTD, pairs_of(tensors), static)
    return hidden_RTD, *chain.from_iterable(memory for memory in memories if memory is not None)


def _gradients(layers, parameters: Sequence[nn.Parameter], metadata: AttentionMetadata, inputs: Tensors) -> Tensors:
    """Aliases take the place of parameters, whose nodes in autograd's graph belong to another stream than a capture's.

    Hooks that would move what is saved to the host do not apply within a step.
    """
    num_tables, num_inputs = 4, 1 + 2 * len(layers)
    tables, given, output_gradients = (
        inputs[:num_tables],
        inputs[num_tables:][:num_inputs],
        inputs[num_tables:][num_inputs:],
    )
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
        aliases = {id(parameter): parameter.detach().requires_grad_() for parameter in parameters}
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        outputs = _forward([_with_aliases(layer, aliases) for layer in layers], metadata, (*tables, *leaves))
        differentiable = [pair for pair in zip(outputs, output_gradients, strict=True) if pair[0].requires_grad]
        return torch.autograd.grad(
            [output for output, _ in differentiable],
            [*leaves, *aliases.values()],
            [gradient for _, gradient in differentiable],
            materialize_grads=True,
        )


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _with_aliases(layer: nn.Module, aliases: dict[int, torch.Tensor]) -> Callable[..., Any]:
    own = {name: aliases[id(one)] for name, one in layer.named_parameters() if id(one) in aliases}
    return lambda *arguments: functional_call(layer, own, arguments)


def pairs_of(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    return [Memory(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def steps_of(layers: nn.ModuleList) -> Steps:
    """The layers' static steps; new ones when modules, settings or parameters have changed."""
    steps = layers.__dict__.get("_static_steps")  # they live as long as the layers
    if steps is None or steps.arrangement != _arrangement(layers):
        device = next(layers.parameters()).device.type
        steps = layers.__dict__["_static_steps"] = Steps(layers, GRAPHS[device])
    return steps


def _arrangement(layers: nn.ModuleList) -> list:
    """What a captured step depends on: the modules, and the addresses of their parameters."""
    config = getattr(layers[0].self_attn, "config", None)
    found: list = [getattr(config, "_attn_implementation", None)]
    found += map(id, layers.modules())
    return found + [
        (parameter.data_ptr(), parameter.dtype, parameter.requires_grad) for parameter in layers.parameters()
    ]
