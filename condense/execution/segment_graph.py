"""A whole segment through all layers as one static step: a CUDA graph, captured once and replayed for every segment.

A segment that has a memory always takes the same operations, so that one launch replaces those of all its layers. With
gradient checkpointing there is a second graph, of a segment's forward pass together with its backward pass: as a
checkpoint does, a segment stores its input and its memory, and computes the rest again when its gradients are needed.

    model.config.schedule = "graph"

A text's first segment, which has no memory, parts of segments, and segments of some rows alone run one layer after the
other. Embeddings, the final norm, the head and the loss are no part of a graph.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..attention import AttentionMetadata
from ..attention.mask import AttentionMask
from ..configuration import CondenseConfig
from ..layers import DecoderBlock
from ..memory import Memory, RecurrentState
from .cuda_graph import GRAPHS, STATIC_IMPLEMENTATIONS, UNFIT_ROPE_TYPES, Graphs
from .executor import CheckpointFunction, ChunkOutput, Embed, OutputFunction, offload_checkpoint, run_layers
from .sequential import SequentialExecutor

Tensors = tuple[torch.Tensor, ...]
REMEDY = "set schedule='sequential' (or 'auto')"


class GraphExecutor:
    """Consecutive whole segments of all rows that have a memory replay a graph; all other chunks run sequentially."""

    def __init__(
        self,
        layers: nn.ModuleList,
        state: RecurrentState,
        embed: Embed,
        output: OutputFunction,
        checkpoint: CheckpointFunction | None = None,
    ):
        self.layers, self.state, self.embed, self.output, self.checkpoint = layers, state, embed, output, checkpoint
        self.sequential = SequentialExecutor(list(layers), state, embed, output, checkpoint)
        self.run: _Run | None = None

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        chunk = metadata.chunk
        has_memory = chunk.whole_segments and chunk.all_rows and chunk.segments[0] > 0
        if not has_memory or metadata.mask.log_duration_RK is not None:
            return self.finish() + self.sequential.submit(metadata)
        if self.run is None:
            key_values = self.state.key_values(chunk)
            memories = [item.memory(chunk) for item in key_values if item is not None]
            assert len(memories) == len(self.layers)
            kind = _Run if self.checkpoint is None else _TrainingRun
            self.run = kind(self.layers, [tensor for memory in memories if memory for tensor in memory])
        with _storage_of(self.checkpoint):
            hidden_RTD = self.run.advance(self.embed(chunk), metadata)
        if self.checkpoint is None:
            output = self.output(hidden_RTD, chunk)
        else:  # logits are computed again, as in a checkpointed segment
            output = self.checkpoint(partial(_output, self.output, chunk), hidden_RTD)
        return [(chunk, output)]

    def finish(self) -> list[ChunkOutput]:
        run, self.run = self.run, None
        if run is not None and run.newest is not None and run.newest.writes_memory:
            self.state.write_memory(_pairs(run.memories()), run.newest.chunk)
        return []


def _output(output: OutputFunction, chunk, hidden_RTD: torch.Tensor) -> Any:
    return output(hidden_RTD, chunk)


def _storage_of(checkpoint: CheckpointFunction | None):
    """Where a segment's input and memory wait for the backward pass: in host memory under `offload_memories`."""
    if getattr(checkpoint, "func", None) is offload_checkpoint:
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    return nullcontext()


class _Run:
    """Segments in a row, without gradients. `tensors` are the memories before them: keys and values layer by layer."""

    def __init__(self, layers: nn.ModuleList, tensors: Sequence[torch.Tensor]):
        self.steps, self.tensors = steps_of(layers), tensors
        self.newest: AttentionMetadata | None = None

    def advance(self, input_RTD: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        hidden_RTD, *self.tensors = self.steps.forward(metadata, (input_RTD, *self.tensors))
        self.newest = metadata
        return hidden_RTD  # the next replay writes over it; the final norm has read it then

    def memories(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.tensors]


class _TrainingRun(_Run):
    """As `_Run`, with gradients for the inputs, the memories and the weights.

    The weights' gradients are summed over the segments of the run and handed to autograd once, at the run's begin: a
    tensor that each segment passes to the next makes autograd reach the begin last.
    """

    def __init__(self, layers: nn.ModuleList, tensors: Sequence[torch.Tensor]):
        super().__init__(layers, tensors)
        self.sums = _Sums(self.steps)
        self.link = _Begin.apply(self.sums, tensors[0].new_zeros(()), *self.steps.parameters)

    def advance(self, input_RTD: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        self.link, hidden_RTD, *self.tensors = _Segment.apply(self.sums, metadata, self.link, input_RTD, *self.tensors)
        self.newest = metadata
        return hidden_RTD

    def memories(self) -> list[torch.Tensor]:
        return list(self.tensors)


class _Sums:
    """The weights' gradients of a run so far. Autograd keeps this object, and so it must not hold the run's tensors."""

    def __init__(self, steps: "Steps"):
        self.steps = steps
        self.gradients: list[torch.Tensor] | None = None

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        if self.gradients is None:
            self.gradients = [gradient.clone() for gradient in gradients]
        elif gradients:
            torch._foreach_add_(self.gradients, list(gradients))


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: _Sums, link: torch.Tensor, *parameters):
        ctx.sums = sums
        ctx.save_for_backward(*parameters)  # autograd then notices a parameter that changes before the backward pass
        return link.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        num_parameters = len(ctx.saved_tensors)
        gradients, ctx.sums.gradients = ctx.sums.gradients, None
        return None, None, *(gradients or [None] * num_parameters)


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: _Sums, metadata: AttentionMetadata, link: torch.Tensor, *inputs):
        ctx.sums = sums
        ctx.save_for_backward(*inputs)
        outputs = sums.steps.forward(metadata, inputs)
        # Captured here, since the backward pass runs in threads of autograd's own.
        ctx.step = sums.steps.backward(metadata, (*inputs, *outputs))
        return link.clone(), *(tensor.clone() for tensor in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, link_gradient, *output_gradients):
        inputs = ctx.saved_tensors
        gradients = ctx.step.run((*inputs, *output_gradients))
        ctx.sums.add(gradients[len(inputs) :])
        return None, None, link_gradient, *(gradient.clone() for gradient in gradients[: len(inputs)])


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
    """The static steps of a model's layers, one for each shape; they hold while the weights stay where they are."""

    def __init__(self, layers: nn.ModuleList, graphs: Graphs):
        self.layers, self.graphs = list(layers), graphs
        self.parameters = [parameter for parameter in layers.parameters() if parameter.requires_grad]
        self.arrangement = _arrangement(layers)
        self._steps: dict[tuple, StaticStep] = {}

    def __reduce__(self):
        return type(None), ()  # a copied model captures its own

    def forward(self, metadata: AttentionMetadata, inputs: Tensors) -> Tensors:
        """The output [R, T, D] of the last layer, and the next memories' keys and values layer by layer."""
        with torch.no_grad():
            return self._step(("forward",), partial(_forward, self.layers, _static(metadata)), inputs).run(inputs)

    def backward(self, metadata: AttentionMetadata, inputs: Tensors) -> StaticStep:
        """The step from the inputs of `forward` and the gradients of its outputs to the gradients of the inputs and of
        the parameters."""
        compute = partial(_gradients, self.layers, self.parameters, _static(metadata))
        return self._step(("backward", metadata.detach_R), compute, inputs)

    def _step(self, kind: tuple, compute: Callable[[Tensors], Tensors], inputs: Tensors) -> StaticStep:
        modes = self.layers[0].training, torch.is_inference_mode_enabled()
        key = *kind, *modes, *((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self._steps:
            self._steps[key] = StaticStep(compute, inputs, self.graphs)
        return self._steps[key]


def _static(metadata: AttentionMetadata) -> AttentionMetadata:
    """The metadata of any segment with a memory; its mask is computed within the step that needs it."""
    return replace(metadata, mask=AttentionMask(metadata.chunk), writes_memory=True)


def _forward(layers: Sequence[DecoderBlock], metadata: AttentionMetadata, inputs: Tensors) -> Tensors:
    hidden_RTD, memories = run_layers(layers, inputs[0], _pairs(inputs[1:]), metadata)
    return hidden_RTD, *chain.from_iterable(memory for memory in memories if memory is not None)


def _gradients(layers, parameters: Sequence[nn.Parameter], metadata: AttentionMetadata, inputs: Tensors) -> Tensors:
    num_inputs = 1 + 2 * len(layers)
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:num_inputs]]
        outputs = _forward(layers, metadata, tuple(leaves))
        return torch.autograd.grad(outputs, [*leaves, *parameters], inputs[num_inputs:], materialize_grads=True)


def _pairs(tensors: Sequence[torch.Tensor]) -> list[Memory]:
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


def check_graph(config: CondenseConfig, layers: nn.ModuleList, checkpointing: bool, has_durations: bool) -> None:
    """Raises `ValueError` where segments can't be computed as one graph; changes nothing."""
    device = next(layers.parameters()).device.type
    if device not in GRAPHS:
        raise ValueError(f"schedule='graph' replays CUDA graphs, and the model is on {device}: {REMEDY}.")
    if config.depth is not None:
        raise ValueError(f"schedule='graph' has no step for a depth block: {REMEDY}.")
    if has_durations:
        raise ValueError(f"schedule='graph' has no step for tokens with durations: {REMEDY}.")
    if config._attn_implementation not in STATIC_IMPLEMENTATIONS:
        raise ValueError(
            f"schedule='graph' has no step for attn_implementation={config._attn_implementation!r}: call "
            f"model.set_attn_implementation('sdpa'), or {REMEDY}."
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in UNFIT_ROPE_TYPES:
        raise ValueError(
            f"schedule='graph' needs rotary tables that do not change, and those of rope_type={rope_type!r} depend on "
            f"the length: {REMEDY}."
        )
    if torch.is_grad_enabled() and not checkpointing:
        raise ValueError(
            "schedule='graph' computes segments again in the backward pass: call model.train() and "
            f"model.gradient_checkpointing_enable(), use torch.no_grad(), or {REMEDY}."
        )
    if checkpointing and config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout}: a replayed graph would drop others in the backward pass "
            f"than in the forward pass: set it to 0, or {REMEDY}."
        )
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ValueError(
            f"autocast keeps its casts of weights outside of a graph: load the model in its dtype, or {REMEDY}."
        )
    for name, module in layers.named_modules():
        if checkpointing and isinstance(module, nn.Dropout) and module.p:
            raise ValueError(
                f"layers.{name} drops values (p={module.p}), and a replayed graph would drop others in the backward "
                f"pass than in the forward pass: set it to 0, or {REMEDY}."
            )
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(f"layers.{name} has hooks, which a replayed graph does not call: {REMEDY}.")
    if any(type(parameter) is not nn.Parameter for parameter in layers.parameters()):
        raise ValueError(f"the layers' parameters are no plain ones (sharded, or quantised): {REMEDY}.")
