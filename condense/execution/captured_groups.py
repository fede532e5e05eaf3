"""A group of whole segments through all layers, captured as CUDA graphs when its shape is used a second time.

The inputs of a group are its rotary tables, the hidden states of its segments, the memories before it and the sinks, if
there are any. Its outputs are the last layer's hidden states of each segment, and the memories after it. Everything
else is part of a capture.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import nn

from ..attention import AttentionMetadata
from ..attention.mask import AttentionMask
from ..state.memory import Memory, TransientState
from .cuda_graph import GRAPHS, Graphs, Pool
from .executor import ChunkOutput
from .group_buffers import GroupBuffers
from .stacking import Stack
from .static_sums import StaticSum, static_sums
from .wavefront import WavefrontExecutor

logger = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]
MAX_GROUPS = 8  # captured at a time
PATIENCE = 64  # uncaptured groups that run before a capture is replaced
WAVE_TOKENS = 2048  # of a diagonal's cells; above this a single cell fills a GPU
NUM_TABLES = 6


@dataclass(frozen=True)
class Group:
    """Consecutive whole segments of the same rows."""

    segments: tuple[AttentionMetadata, ...]
    recomputed: bool  # by gradient checkpointing

    @property
    def has_memory(self) -> bool:
        return self.segments[0].chunk.segments[0] > 0

    @property
    def writes_memory(self) -> bool:
        return self.segments[-1].writes_memory

    @cached_property
    def tables(self) -> Tensors:
        """Tables of the first segment, which may be without a memory, of the other segments, and of all as a memory."""
        first, last = self.segments[0], self.segments[-1]
        return *first.rotary, *last.rotary, *first.memory_rotary

    @cached_property
    def sinks(self) -> list[torch.Tensor]:
        """Keys and values layer by layer; a layer of a stack has attention."""
        return [tensor for sink in self.segments[0].sinks or () if sink is not None for tensor in sink]

    def key(self) -> tuple:
        """Everything that a capture depends on, besides the layers."""
        chunk, gradients = self.segments[0].chunk, torch.is_grad_enabled()
        detached = tuple(any(segment.detach_R) for segment in self.segments) if gradients else ()
        shape = len(self.segments), len(chunk.rows), chunk.width, self.has_memory, self.writes_memory
        tables = self.tables[0]
        modes = gradients, gradients and self.recomputed, torch.is_inference_mode_enabled()
        return *shape, *modes, detached, tables.shape, tables.dtype, len(self.sinks)

    @property
    def has_mixed_rows(self) -> bool:
        """Returns whether the memories of only some rows are detached: the key does not contain this."""
        return torch.is_grad_enabled() and any(
            any(segment.detach_R) and not all(segment.detach_R) for segment in self.segments
        )

    def run(self, layers: nn.ModuleList, inputs: Tensors, buffers: GroupBuffers | None = None) -> Tensors:
        """Computes the outputs, whose backward pass needs `buffers`; a segment uses only the shape of its metadata."""
        tables, rest = inputs[:NUM_TABLES], inputs[NUM_TABLES:]
        embedded, rest = iter(rest[: len(self.segments)]), rest[len(self.segments) :]
        memories, sinks = rest[: len(rest) - len(self.sinks)], rest[len(rest) - len(self.sinks) :]
        chunk = self.segments[0].chunk
        state = TransientState(chunk.batch_size, chunk.segment_length, pairs_of(memories) or [None] * len(layers))
        state.rows = chunk.rows
        executor = WavefrontExecutor(layers, state, lambda chunk: next(embedded), buffers)
        in_waves = len(chunk.rows) * chunk.width < WAVE_TOKENS
        outputs: list[ChunkOutput] = []
        for segment in self._static(tables, sinks):
            outputs += executor.submit(segment)
            if not in_waves:  # a wave of one segment after the other: all layers in turn
                outputs += executor.finish()
        outputs += executor.finish()
        after = state.memories if self.writes_memory else []
        memories_after = chain.from_iterable(memory for memory in after if memory is not None)
        return *(hidden_RTD for _, hidden_RTD in outputs), *memories_after

    def _static(self, tables: Tensors, sinks: Tensors) -> list[AttentionMetadata]:
        """Returns the segments' metadata with these tables and sinks, and masks that are made within the capture."""
        first, others, as_memory = ((tables[i], tables[i + 1]) for i in range(0, NUM_TABLES, 2))
        masks: dict[tuple[Any, ...], torch.Tensor] = {}
        return [
            replace(
                segment,
                rotary=others if number else first,
                memory_rotary=as_memory,
                mask=AttentionMask(segment.chunk, None, masks),
                sinks=pairs_of(sinks) or None,
                detach_R=segment.detach_R if torch.is_grad_enabled() else (False,) * len(segment.chunk.rows),
            )
            for number, segment in enumerate(self.segments)
        ]


def pairs_of(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    return [Memory(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


class PendingBackward:
    """A text between the forward and the backward pass of a stored group; it ends with autograd's graph."""

    ended = False


class CapturedGroup:
    """A group without gradients; also the buffers of a group with gradients."""

    def __init__(self, layers: nn.ModuleList, group: Group, inputs: Tensors, graphs: Graphs, pool: Pool):
        self._layers = ref(layers)  # which hold this
        self.group, self.graphs, self.pool = group, graphs, pool
        self.device = inputs[NUM_TABLES].device
        self.inputs = tuple(one.detach().clone(memory_format=torch.contiguous_format) for one in inputs)
        self._capture()

    @property
    def layers(self) -> nn.ModuleList:
        layers = self._layers()
        assert layers is not None
        return layers

    def _capture(self) -> None:
        self._forward, self.outputs = self._graph_of(self._compute)

    def _graph_of(self, *computations: Any) -> Any:
        """Returns replay and outputs of each computation; all run once before the first is captured."""
        for compute in computations:
            self.graphs.warm_up(compute, self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the pool may need the warm-up's memory
        found = [self.graphs.capture(compute, self.device, self.pool) for compute in computations]
        return found[0] if len(found) == 1 else found

    def _compute(self) -> Tensors:
        with torch.no_grad():
            return self.group.run(self.layers, self.inputs)

    def forward(self, inputs: Tensors) -> Tensors:
        self._copy(self.inputs, inputs)
        self._forward()
        return self._copies(self.outputs)

    def _copy(self, buffers: Tensors, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(buffers, [tensor.detach() for tensor in tensors])

    def _copies(self, buffers: Sequence[torch.Tensor]) -> Tensors:
        """Copies the buffers, because the next replay overwrites them."""
        copies = tuple(torch.empty_like(buffer) for buffer in buffers)
        torch._foreach_copy_(copies, [buffer.detach() for buffer in buffers])
        return copies


class TrainedGroup(CapturedGroup):
    """A group with gradients: buffers for the gradients of its outputs and of its inputs."""

    def __init__(self, *arguments: Any, sums: dict[str, StaticSum]):
        self.sums = sums
        self.gradients: Tensors = ()
        super().__init__(*arguments)

    def _compute_with_gradients(self) -> tuple[Tensors, Tensors, GroupBuffers]:
        """Returns leaves and outputs. Hooks that would move saved tensors to the host do not apply within a capture.

        Detached tensors are saved: saved by hooks, others would keep a graph alive that runs out of memory.
        """
        segments, chunk = self.group.segments, self.group.segments[0].chunk
        tokens = len(chunk.rows) * chunk.width
        buffers = GroupBuffers(self.sums, len(self.layers), chunk.segments[0], len(segments), tokens)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
            leaves = tuple(tensor.detach().requires_grad_() for tensor in self.inputs[NUM_TABLES:])
            return leaves, self.group.run(self.layers, (*self.inputs[:NUM_TABLES], *leaves), buffers), buffers

    def _gradients(self, leaves: Tensors, outputs: Tensors, buffers: GroupBuffers) -> Tensors:
        """Returns the gradients of the leaves, and adds the gradients of the weights to the sums."""
        pairs = [pair for pair in zip(outputs, self.gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        buffers.finish()
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)

    def _begin_pass(self) -> None:
        for one in self.sums.values():
            one.begin_pass()


class RecomputedGroup(TrainedGroup):
    """Works as a checkpoint does: the graph of the backward pass computes the group again."""

    def _capture(self) -> None:
        super()._capture()
        self.gradients = tuple(torch.zeros_like(output) for output in self.outputs)
        self._backward, self.input_gradients = self._graph_of(self._compute_again)

    def _compute_again(self) -> Tensors:
        return self._gradients(*self._compute_with_gradients())

    def begin(self) -> PendingBackward:
        return PendingBackward()

    def backward(self, pending: PendingBackward, inputs: Tensors, gradients: Tensors) -> Tensors:
        self._copy((*self.inputs, *self.gradients), (*inputs, *gradients))
        self._begin_pass()
        self._backward()
        return self._copies(self.input_gradients)


class StoredGroup(TrainedGroup):
    """Works without checkpointing: the activations of one text at a time wait in the memory of the graphs."""

    def __init__(self, *arguments: Any, pool_owner: "PoolOwner", **keywords: Any):
        self.pool_owner = pool_owner
        self._stored: Any = None  # leaves, outputs and buffers, between the two computations
        super().__init__(*arguments, **keywords)

    def _capture(self) -> None:
        with torch.no_grad():
            self.gradients = tuple(
                torch.zeros_like(output) for output in self.graphs.warm_up(self._compute, self.device)
            )
        found = self._graph_of(self._compute_stored, self._compute_gradients)
        (self._forward, self.outputs), (self._backward, self.input_gradients) = found
        self.outputs = tuple(output.detach() for output in self.outputs)

    def _compute_stored(self) -> Tensors:
        self._stored = self._compute_with_gradients()
        return self._stored[1]

    def _compute_gradients(self) -> Tensors:
        stored, self._stored = self._stored, None  # the warm-up's buffers must be gone when the capture begins
        return self._gradients(*stored)

    def begin(self) -> PendingBackward:
        return self.pool_owner.begin()

    def backward(self, pending: PendingBackward, inputs: Tensors, gradients: Tensors) -> Tensors:
        self.pool_owner.check(pending)
        self._copy(self.gradients, gradients)
        self._begin_pass()
        self._backward()
        pending.ended = True
        return self._copies(self.input_gradients)


class PoolOwner:
    """The text whose activations are in the pool of stored groups."""

    def __init__(self) -> None:
        self._latest: ref[PendingBackward] | None = None

    def begin(self) -> PendingBackward:
        pending = PendingBackward()
        self._latest = ref(pending)
        return pending

    def is_busy(self) -> bool:
        pending = None if self._latest is None else self._latest()
        return pending is not None and not pending.ended

    def check(self, pending: PendingBackward) -> None:
        """Raises `ValueError` if a backward pass has overwritten the activations with its gradients."""
        if pending.ended or self._latest is None or self._latest() is not pending:
            raise ValueError(
                "a second backward pass through a call: a captured CUDA graph has written over its activations. Set "
                "model.config.schedule='wavefront' for calls whose graph is kept (retain_graph=True)."
            )


class CapturedGroups:
    """The captured groups of a model's layers; they are valid as long as the layers' stack.

    They belong to the thread that makes them, because a graph has one set of buffers. Other threads run without graphs.
    """

    def __init__(self, layers: nn.ModuleList, stack: Stack):
        self._layers, self.stack, self.thread = ref(layers), stack, threading.get_ident()
        self.device = next(layers.parameters()).device
        self.graphs = GRAPHS[self.device.type]
        self.pool_owner = PoolOwner()
        self.num_runs = 0
        self._uses: Counter[tuple] = Counter()
        self._refused: set[tuple] = set()
        self._groups: OrderedDict[tuple, tuple[CapturedGroup, int]] = OrderedDict()
        self._pools: dict[bool, Pool] = {}

    def __reduce__(self):
        return type(None), ()  # a copied model captures its own

    @cached_property
    def sums(self) -> dict[str, StaticSum]:
        return static_sums(self.stack)

    def count_use(self, group: Group) -> bool:
        """Counts a use of a group that is about to run; returns whether to call `find` for it."""
        if threading.get_ident() != self.thread or group.has_mixed_rows:
            return False
        key = self._key(group)
        self.num_runs += 1
        if torch._C._current_graph_task_id() != -1 or key in self._refused:
            return False  # within a backward pass a capture would add to its sums
        if torch.is_grad_enabled() and moves_saved_tensors():
            return False
        if self._is_stored(group) and self.pool_owner.is_busy():
            return False
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # by the caller
        self._uses[key] += 1
        if key in self._groups:
            return True
        if len(self._groups) == MAX_GROUPS:
            _, last_run = next(iter(self._groups.values()))
            if self.num_runs - last_run < PATIENCE:
                return False
        return self._uses[key] > 1

    def find(self, group: Group, memories: Sequence[torch.Tensor]) -> CapturedGroup | None:
        """Returns the captured group, or None if memory is too small; then it never tries the group's shape again."""
        key = self._key(group)
        if key in self._groups:
            captured, _ = self._groups[key]
        else:
            if len(self._groups) == MAX_GROUPS:
                self._groups.popitem(last=False)
            try:
                captured = self._capture(group, memories)
            except torch.OutOfMemoryError:
                self._refuse(key, group)
                return None
        self._groups[key] = captured, self.num_runs
        self._groups.move_to_end(key)
        return captured

    def _refuse(self, key: tuple, group: Group) -> None:
        self._refused.add(key)
        torch.cuda.empty_cache()
        logger.warning(
            "There is not enough memory to capture %d segments of %d rows as a CUDA graph: calls of this shape run "
            "without one. schedule='wavefront' never captures.",
            len(group.segments),
            len(group.segments[0].chunk.rows),
        )

    def _capture(self, group: Group, memories: Sequence[torch.Tensor]) -> CapturedGroup:
        stored, chunk = self._is_stored(group), group.segments[0].chunk
        if stored not in self._pools:
            self._pools[stored] = self.graphs.new_pool(self.device)
        weight_D = self.stack.parameters["input_layernorm.weight"].all[0]
        hidden_RTD = weight_D.new_zeros(len(chunk.rows), chunk.width, len(weight_D))
        inputs = *group.tables, *[hidden_RTD] * len(group.segments), *memories, *group.sinks
        layers = self._layers()
        assert layers is not None
        arguments = layers, group, inputs, self.graphs, self._pools[stored]
        if not torch.is_grad_enabled():
            return CapturedGroup(*arguments)
        if stored:
            return StoredGroup(*arguments, sums=self.sums, pool_owner=self.pool_owner)
        return RecomputedGroup(*arguments, sums=self.sums)

    def _is_stored(self, group: Group) -> bool:
        return torch.is_grad_enabled() and not group.recomputed

    def _key(self, group: Group) -> tuple:
        layer: Any = self.stack.layers[0]
        return *group.key(), layer.training, layer.self_attn.config._attn_implementation


def moves_saved_tensors() -> bool:
    """Returns whether hooks would move or count the tensors that autograd saves, as `torch.autograd.graph.save_on_cpu`
    or a caller's checkpoint around the model does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def captured_groups_of(layers: nn.ModuleList, stack: Stack) -> CapturedGroups:
    """Returns the layers' captured groups, or new groups if they were captured from a different stack."""
    groups = layers.__dict__.get("_captured_groups")  # they live as long as the layers
    if groups is None or groups.stack is not stack:
        groups = layers.__dict__["_captured_groups"] = CapturedGroups(layers, stack)
    return groups
