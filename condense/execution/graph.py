"""Groups of whole segments as CUDA graphs: one launch replaces the launches of all their layers.

    model.config.schedule = "graph"

With gradient checkpointing a group consists of the segments of a checkpoint: it stores its inputs, and the graph of its
backward pass computes it again. Otherwise it consists of all whole segments in a row, and their activations wait for
the backward pass in the graphs' own memory. Without gradients it has `INFERENCE_SEGMENTS` segments.

A shape is captured at its second use. Not captured: parts of segments, shapes that occur once or do not fit into
memory, and a text that begins while another text waits for its backward pass. Embeddings, the final norm, the head and
the loss are not part of a graph.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..attention import AttentionMetadata
from ..configuration import CondenseConfig
from ..embedding import ChunkEmbedder
from ..ops.shared_weights import begin
from ..ops.transforms import is_transformed
from ..segmentation import SegmentPositions
from ..state.memory import RecurrentState
from .captured_groups import CapturedGroup, Group, PendingBackward, captured_groups_of, pairs_of
from .checkpointing import CheckpointFunction, storage_of
from .cuda_graph import GRAPHS, STATIC_IMPLEMENTATIONS
from .executor import ChunkOutput, Executor
from .stacking import REMEDY, Stack, check_stackable, stack_of
from .static_sums import StaticSum

INFERENCE_SEGMENTS = 8  # of a group without gradients


class GraphExecutor:
    """`others` runs everything outside of graphs. `group_segments` is None for all whole segments in a row."""

    def __init__(
        self,
        layers: nn.ModuleList,
        stack: Stack,
        state: RecurrentState,
        embed: ChunkEmbedder,
        others: Executor,
        checkpoint: CheckpointFunction | None,
        group_segments: int | None,
    ):
        self.groups = captured_groups_of(layers, stack)
        self.state, self.embed, self.others = state, embed, others
        self.checkpoint, self.group_segments = checkpoint, group_segments
        self.segments: list[AttentionMetadata] = []
        self.tokens: list[torch.Tensor | None] | None = None  # of the weights' sums

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        outputs: list[ChunkOutput] = []
        if self.segments and metadata.chunk.rows != self.segments[0].chunk.rows:
            outputs = self._run_group()
        if not metadata.chunk.whole_segments or metadata.mask.log_duration_RK is not None:
            return outputs + self._run_group() + self.others.submit(metadata)
        self.segments.append(metadata)
        return outputs + (self._run_group() if len(self.segments) == self.group_segments else [])

    def finish(self) -> list[ChunkOutput]:
        return self._run_group() + self.others.finish()

    def _run_group(self) -> list[ChunkOutput]:
        segments, self.segments = tuple(self.segments), []
        if not segments:
            return []
        group = Group(segments, recomputed=self.checkpoint is not None)
        outputs: list[ChunkOutput] = []
        if self.groups.count_use(group):
            outputs = self.others.finish()  # the state is complete then
            memories = self._memories(group)
            if (captured := self.groups.find(group, memories)) is not None:
                return outputs + self._run_captured(captured, group, memories)
        return outputs + [each for metadata in segments for each in self.others.submit(metadata)]

    def _memories(self, group: Group) -> list[torch.Tensor]:
        """Lists keys and values layer by layer."""
        chunk = group.segments[0].chunk
        memories = [None if item is None else item.memory(chunk) for item in self.state.key_values(chunk)]
        tensors = [tensor for memory in memories if memory is not None for tensor in memory]
        assert len(tensors) == (2 * len(memories) if group.has_memory else 0)
        return tensors

    def _run_captured(
        self, captured: CapturedGroup, group: Group, memories: Sequence[torch.Tensor]
    ) -> list[ChunkOutput]:
        chunks = [metadata.chunk for metadata in group.segments]
        inputs = [*(self.embed(chunk) for chunk in chunks), *memories, *group.sinks]
        if torch.is_grad_enabled():
            if self.tokens is None:
                self.tokens = [begin(one)[1] for one in self.groups.sums.values()]
            with storage_of(self.checkpoint):
                outputs = list(_Group.apply(captured, group, len(inputs), *inputs, *self.tokens))
        else:
            outputs = list(captured.forward((*group.tables, *inputs)))
        if group.writes_memory:
            self.state.write_memory(pairs_of(outputs[len(chunks) :]), chunks[-1])
        return list(zip(chunks, outputs[: len(chunks)], strict=True))


class _Group(torch.autograd.Function):
    """Adds the gradients of weights to their sums, to which the tokens lead; its inputs have gradients of their own."""

    @staticmethod
    def forward(ctx, captured: Any, group: Group, num_inputs: int, *inputs_and_tokens: torch.Tensor):
        inputs = inputs_and_tokens[:num_inputs]
        ctx.captured, ctx.tables, ctx.pending = captured, group.tables, captured.begin()
        ctx.versions, ctx.num_tokens = versions(captured.sums.values()), len(inputs_and_tokens) - num_inputs
        ctx.save_for_backward(*inputs)
        return captured.forward((*group.tables, *inputs))

    @staticmethod
    def backward(ctx, *output_gradients):
        check_gradient(next((gradient for gradient in output_gradients if gradient is not None), None))
        if ctx.versions != versions(ctx.captured.sums.values()):
            raise ValueError(
                "the model's weights have changed since the forward pass, in place: call backward() before weights "
                "change."
            )
        pending: PendingBackward = ctx.pending
        gradients = ctx.captured.backward(pending, (*ctx.tables, *ctx.saved_tensors), output_gradients)
        return None, None, None, *gradients, *[None] * ctx.num_tokens


def check_gradient(gradient: torch.Tensor | None) -> None:
    """Raises `ValueError` in a backward pass that a captured graph can't take part in."""
    if torch.is_grad_enabled():
        reason = "create_graph=True: a captured CUDA graph has no second derivatives"
    elif gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
        reason = "is_grads_batched=True: a captured CUDA graph computes the gradients of one vector at a time"
    else:
        return
    raise ValueError(f"{reason}. Set model.config.schedule='wavefront' (or 'sequential').")


def versions(sums: Iterable[StaticSum]) -> list[int]:
    """Returns the versions of all weights, which change when an optimizer changes weights in place."""
    return [weight._version for one in sums for weight in one.weights]


def has_whole_segments(lengths: Sequence[int], positions: SegmentPositions) -> bool:
    """Returns whether a call with `lengths[b]` further tokens of each row has a whole segment of all rows."""
    length = positions.segment_length
    if not any(positions.offsets):
        return len({segment > 0 for segment in positions.segments}) == 1 and min(lengths) >= length
    # The first chunk ends all rows' segments; after it, they run together.
    rest = [tokens - (length - offset) for tokens, offset in zip(lengths, positions.offsets, strict=True)]
    return min(rest) >= length


def graph_stack(
    config: CondenseConfig, layers: nn.ModuleList, hidden_dtype: torch.dtype, has_durations: bool, sharded: bool
) -> Stack:
    """Returns the layers' stack, which graphs read. Raises `ValueError` if graphs can't compute the segments."""
    weight = next(layers.parameters())
    device = weight.device.type
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
    if torch.is_grad_enabled() and layers[0].training and config.attention_dropout:
        raise ValueError(
            f"attention_dropout={config.attention_dropout}: a replayed graph would drop different weights in "
            f"its forward and backward passes: set it to 0, or {REMEDY}."
        )
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        raise ValueError(
            "autocast keeps its casts of weights outside of a graph: leave autocast and load the model in the dtype of "
            f"the computation (dtype=bfloat16 in a recipe does so under the DeepSpeed launcher), or {REMEDY}."
        )
    if sharded:
        raise ValueError(f"FSDP gathers weights for each call, and a graph would keep their addresses: {REMEDY}.")
    check_stackable(layers)  # quantized weights have other dtypes
    if hidden_dtype != weight.dtype:
        raise ValueError(
            f"embeddings are in {hidden_dtype} and the layers in {weight.dtype}, which a graph does not mix: cast one "
            f"of them, or {REMEDY}."
        )
    if torch.is_anomaly_enabled():
        raise ValueError(f"autograd's anomaly detection reads every gradient, which a graph can't: {REMEDY}.")
    if is_transformed() or is_in_torch_dispatch_mode():
        raise ValueError(
            f"a replayed graph hides its operations from torch.compile, torch.func and modes that watch operations: "
            f"{REMEDY}."
        )
    if torch.nn.modules.module._has_any_global_hook():
        raise ValueError(f"there are hooks on all modules, which a replayed graph does not call: {REMEDY}.")
    stack = stack_of(layers)
    if stack.is_apart:
        raise ValueError(
            f"weights of the layers lie at unequal distances in memory that is not theirs alone (as with ZeRO's "
            f"round_robin_gradients), and a graph reads them as one tensor: {REMEDY}."
        )
    return stack
