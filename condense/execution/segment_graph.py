"""A whole segment through all layers as one static step: a CUDA graph, captured once and replayed for every segment.

A segment that has a memory always takes the same operations, so that one launch replaces those of all its layers. With
gradient checkpointing there is a second graph, of a segment's forward pass together with its backward pass: as a
checkpoint does, a segment stores its input and its memory, and computes the rest again when its gradients are needed.

    model.config.schedule = "graph"

A text's first segment, which has no memory, parts of segments, and segments of some rows alone run one layer after the
other. Embeddings, the final norm, the head and the loss are no part of a graph.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..attention import AttentionMetadata
from ..configuration import CondenseConfig
from ..embedding import ChunkEmbedder
from ..memory import RecurrentState, TransientState
from ..segmentation import SegmentPositions
from ..shared_weights import sum_dtype
from .checkpointing import CheckpointedExecutor, CheckpointFunction, storage_of
from .cuda_graph import GRAPHS, STATIC_IMPLEMENTATIONS
from .executor import ChunkOutput, Executor
from .segment_steps import Steps, pairs_of, rotary_tables_of, steps_of
from .sequential import SequentialExecutor
from .stacking import CONTAINERS, STACKED, has_hooks

REMEDY = "set schedule='sequential' (or 'auto')"


class GraphExecutor:
    """Consecutive whole segments of all rows that have a memory replay a graph; all other chunks run sequentially."""

    def __init__(
        self,
        layers: nn.ModuleList,
        state: RecurrentState,
        embed: ChunkEmbedder,
        checkpoint: CheckpointFunction | None = None,
    ):
        self.layers, self.state, self.embed, self.checkpoint = layers, state, embed, checkpoint
        self.others: Executor
        if checkpoint is None:
            self.others = SequentialExecutor(list(layers), state, embed)
        else:
            assert isinstance(state, TransientState), "a cache is not checkpointed"
            self.others = CheckpointedExecutor(SequentialExecutor, layers, state, embed, checkpoint, 1)
        self.run: _Run | None = None

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        chunk = metadata.chunk
        has_memory = chunk.whole_segments and chunk.all_rows and chunk.segments[0] > 0
        if not has_memory or metadata.mask.log_duration_RK is not None:
            return self.finish() + self.others.submit(metadata)
        if self.run is None:
            assert self.checkpoint is not None or not torch.is_grad_enabled(), "see check_graph"
            key_values = self.state.key_values(chunk)
            memories = [item.memory(chunk) for item in key_values if item is not None]
            assert len(memories) == len(self.layers)
            kind = _Run if self.checkpoint is None else _TrainingRun
            self.run = kind(self.layers, [tensor for memory in memories if memory for tensor in memory])
        with storage_of(self.checkpoint):
            return [(chunk, self.run.advance(self.embed(chunk), metadata))]

    def finish(self) -> list[ChunkOutput]:
        run, self.run = self.run, None
        if run is not None and run.newest is not None and run.newest.writes_memory:
            self.state.write_memory(pairs_of(run.memories()), run.newest.chunk)
        return []


class _Run:
    """Segments in a row, without gradients. `tensors` are the memories before them: keys and values layer by layer."""

    def __init__(self, layers: nn.ModuleList, tensors: Sequence[torch.Tensor]):
        self.steps, self.tensors = steps_of(layers), tensors
        self.newest: AttentionMetadata | None = None

    def advance(self, input_RTD: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        hidden_RTD, *self.tensors = self.steps.forward(metadata, (input_RTD, *self.tensors))
        self.newest = metadata
        return hidden_RTD[:]  # the next replay writes over it

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
    """The weights' gradients of a run so far, in float32, in one backward pass.

    A pass that asks for the gradients of other tensors may never reach the run's begin. Autograd keeps this object, so
    it must not hold the run's tensors.
    """

    def __init__(self, steps: Steps):
        self.steps = steps
        self.gradients: list[torch.Tensor] | None = None
        self.backward_pass: int | None = None

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        backward_pass = torch._C._current_graph_task_id()
        if self.gradients is None or self.backward_pass != backward_pass:
            self.gradients = [gradient.to(sum_dtype(gradient.dtype), copy=True) for gradient in gradients]
            self.backward_pass = backward_pass
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
        parameters = ctx.saved_tensors
        gradients, ctx.sums.gradients = ctx.sums.gradients, None
        if gradients is None:
            return None, None, *[None] * len(parameters)
        return None, None, *(one.to(weight.dtype) for one, weight in zip(gradients, parameters, strict=True))


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: _Sums, metadata: AttentionMetadata, link: torch.Tensor, *inputs):
        ctx.sums, ctx.segment = sums, metadata
        ctx.save_for_backward(*inputs)
        outputs = sums.steps.forward(metadata, inputs)
        # Captured here, since the backward pass runs in threads of autograd's own.
        ctx.step = sums.steps.backward(metadata, (*inputs, *outputs))
        return link.clone(), *(tensor.clone() for tensor in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, link_gradient, *output_gradients):
        inputs = ctx.saved_tensors
        gradients = ctx.step.run((*rotary_tables_of(ctx.segment), *inputs, *output_gradients))
        ctx.sums.add(gradients[len(inputs) :])
        return None, None, link_gradient, *(gradient.clone() for gradient in gradients[: len(inputs)])


def is_replayed(lengths: Sequence[int], positions: SegmentPositions) -> bool:
    """Whether a call with `lengths[b]` further tokens of each row has a whole segment of all rows that has a memory."""
    length = positions.segment_length
    if not any(positions.offsets) and all(positions.segments) and min(lengths) >= length:
        return True
    # The first chunk ends all rows' segments; after it, they run together.
    rest = [tokens - (length - offset) for tokens, offset in zip(lengths, positions.offsets, strict=True)]
    return min(rest) >= length


def check_graph(
    config: CondenseConfig, layers: nn.ModuleList, checkpoint_segments: int | None, has_durations: bool, sharded: bool
) -> None:
    """Raises `ValueError` where segments can't be computed as one graph; changes nothing.

    `checkpoint_segments` are those of a group of gradient checkpointing, None without it.
    """
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
    if torch.is_grad_enabled() and checkpoint_segments is None:
        raise ValueError(
            "schedule='graph' computes segments again in the backward pass: call model.train() and "
            f"model.gradient_checkpointing_enable(), use torch.no_grad(), or {REMEDY}."
        )
    if (checkpoint_segments or 1) > 1:
        raise ValueError(
            f"checkpoint_segments={checkpoint_segments}: schedule='graph' computes segments again one by one: set it "
            f"to 1, or {REMEDY}."
        )
    if checkpoint_segments is not None and config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout}: a replayed graph would drop others in the backward pass "
            f"than in the forward pass: set it to 0, or {REMEDY}."
        )
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ValueError(
            "autocast keeps its casts of weights outside of a graph: leave autocast and load the model in the dtype of "
            f"the computation (dtype=bfloat16 in a recipe does so under the DeepSpeed launcher), or {REMEDY}."
        )
    if sharded:
        raise ValueError(f"FSDP gathers weights for each call, and a graph would keep their addresses: {REMEDY}.")
    _check_layers(layers)


def _check_layers(layers: nn.ModuleList) -> None:
    """Raises `ValueError` for modules that a replay would not call, or whose state it can't know."""
    for name, module in layers.named_modules():
        where = f"layers.{name}"
        if has_hooks(module) or "forward" in module.__dict__:
            raise ValueError(
                f"{where} has hooks or a forward of its own, which a replayed graph does not call: {REMEDY}."
            )
        holds = bool(module._modules or module._parameters or module._buffers)
        if holds and type(module) not in (nn.ModuleList, *CONTAINERS, *STACKED):
            raise ValueError(
                f"{where} is a {type(module).__name__}, whose changes a captured graph would not follow: {REMEDY}, or "
                "merge the adapter into the model first."
            )
    if any(type(parameter) is not nn.Parameter or not parameter.numel() for parameter in layers.parameters()):
        raise ValueError(f"the layers' parameters are no plain ones (sharded, or quantised): {REMEDY}.")
    if len({parameter.device for parameter in layers.parameters()}) > 1:
        raise ValueError(f"the layers are on several devices, and a graph is of one: {REMEDY}.")
