"""Pipeline parallelism over segments: rank r works on segment s while rank r + 1 works on segment s - 1.

    rank 0   s0  s1  s2  s3
    rank 1       s0  s1  s2  s3
    rank 2           s0  s1  s2  s3

Each rank holds a contiguous range of layers; the first rank also has the embedding, the last has norm, head and loss.
The memory of a layer stays on its rank, so ranks exchange only the hidden states of a segment, one message per segment
and border, and in training their gradients. The pipeline fills once per text and direction, for any number of segments.

Each rank detaches the tensors that it receives: the hidden states from the rank before, the memories from the segment
before. The backward pass takes the segments in reverse order. One call of autograd per segment leads from its hidden
states and memories to the received tensors, whose gradients are sent to the rank before.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, D hidden size, S chunks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..attention import AttentionMetadata
from ..checks import check_input, real_tokens
from ..embedding import ChunkEmbedder, embed, is_by_token
from ..loss import Targets, check_not_empty, cross_entropies, max_tokens
from ..memory import Memory, TransientState
from ..modeling import CondenseForCausalLM
from ..outputs import CondenseOutput
from ..segmentation import Chunk, UnpaddedBatch
from ..shared_weights import SharedWeights
from ..transforms import hidden_dtype
from .checkpointing import run_checkpointed
from .executor import run_layers

Memories = list[Memory | None]  # for this rank's layers, in order


class PipelineStage:
    """This process's layers of a model that is divided over a process group.

        torch.distributed.init_process_group("nccl")
        model = CondenseForCausalLM.from_pretrained(llama, segment_length=512)
        stage = PipelineStage(model)
        model.to(device)  # after the other ranks' layers have been removed
        stage.loss_and_gradients(input_ids, labels)

    Replaces the modules of other ranks by `nn.Identity`. Names stay: `model.parameters()` are this rank's own, and the
    state dicts of all ranks together are the checkpoint. The first and the last rank both hold a tied embedding, with
    the same gradient: the copies stay equal if both are updated alike, so clip gradients by their norm over all ranks.

    `layers_per_rank`: by default as even as possible, the first ranks have one more; the head costs the last rank as
    much as a layer or more. `group`: by default all processes. Initialise it without `device_id` under nccl: with one,
    messages of different borders wait for each other.

    Raises `ValueError` if `layers_per_rank` does not fit the model and the group.
    """

    def __init__(
        self,
        model: CondenseForCausalLM,
        layers_per_rank: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        rank, num_ranks, num_layers = dist.get_rank(group), dist.get_world_size(group), len(model.model.layers)
        if layers_per_rank is None:
            layers_per_rank = [num_layers // num_ranks + (r < num_layers % num_ranks) for r in range(num_ranks)]
        if len(layers_per_rank) != num_ranks or sum(layers_per_rank) != num_layers or min(layers_per_rank) < 1:
            raise ValueError(
                f"layers_per_rank={list(layers_per_rank)} does not divide {num_layers} layers over {num_ranks} ranks: "
                "pass a number of at least 1 per rank that add up to the model's layers, or start fewer processes."
            )
        if model.config.depth is not None:
            raise ValueError("a pipeline has no place for a depth block: train the model with ZeRO-2 or FSDP instead.")
        self.model, self.group, self.last_rank = model, group, num_ranks - 1
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1
        self.before = None if self.is_first else _Border(rank - 1, group)
        self.after = None if self.is_last else _Border(rank + 1, group)

        self.tied_copy: nn.Embedding | nn.Linear | None = None  # the last or first rank has the same weight
        if model.lm_head.weight is model.model.embed_tokens.weight and self.is_first != self.is_last:
            self.tied_copy = model.model.embed_tokens if self.is_first else model.lm_head

        begin = sum(layers_per_rank[:rank])
        own = range(begin, begin + layers_per_rank[rank])
        self.layers: list[Any] = [model.model.layers[n] for n in own]
        elsewhere = [f"model.layers.{n}" for n in range(num_layers) if n not in own]
        elsewhere += [] if self.is_first else ["model.embed_tokens"]
        elsewhere += [] if self.is_last else ["model.norm", "lm_head"]
        for name in elsewhere:
            model.set_submodule(name, nn.Identity())

    @torch.no_grad()
    def loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> CondenseOutput:
        """Returns `loss`, `segment_losses` [S] and `segment_targets` [S] of the whole model, on every rank.

        input_ids, labels and attention_mask [B, N] as for `CondenseForCausalLM.forward`, the same on all ranks. Raises
        `ValueError` on all ranks for inputs that do not fit together.
        """
        batch = _PipelineBatch(self, input_ids, labels, attention_mask)
        for _ in self._forward(batch):
            pass  # nothing is stored for a backward pass
        return self._output(batch, None)

    @torch.enable_grad()
    def loss_and_gradients(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> CondenseOutput:
        """Works as `loss`, and adds the gradients to this rank's parameters: do not call `backward`.

        The loss is the mean over all labels, or their sum divided by `num_items_in_batch`. With the model's gradient
        checkpointing a segment stores only the hidden states and memories that it receives; the rest is computed again.
        """
        batch = _PipelineBatch(self, input_ids, labels, attention_mask)
        self._backward(batch, list(self._forward(batch)), num_items_in_batch)
        return self._output(batch, num_items_in_batch)

    def _forward(self, batch: "_PipelineBatch") -> Iterator["_SegmentGraph"]:
        memories: Memories = [None] * len(self.layers)
        arrivals = self.before.arrivals(batch.shapes, batch.like) if self.before else iter(())
        for metadata, following in zip(batch.chunks, [*batch.chunks[1:], None], strict=True):
            received_RTD = None
            if not self.is_first:
                received_RTD = _leaf(next(arrivals))
            elif batch.embed is not None:
                batch.embedded.append(batch.embed(metadata.chunk))
                received_RTD = _leaf(batch.embedded[-1])
            forward = partial(self._forward_chunk, batch, metadata, following)
            output, new_memories = run_checkpointed(batch.checkpoint, forward, metadata, received_RTD, memories)
            if self.after:
                self.after.send(output.detach())
            else:
                batch.losses.append(output.detach())
            ends = [get_gradient_edge(end) if end.requires_grad else None for end in (output, *_tensors(new_memories))]
            yield _SegmentGraph(received_RTD, _tensors(memories), ends)
            memories = [memory and Memory(*map(_leaf, memory)) for memory in new_memories]
        if self.after:
            self.after.finish()

    def _forward_chunk(
        self,
        batch: "_PipelineBatch",
        metadata: AttentionMetadata,
        following: AttentionMetadata | None,
        hidden_RTD,
        memories,
    ):
        """Returns the output, hidden states [R, T, D] or on the last rank the loss, and the next chunk's memories."""
        with batch.weights.active():
            return self._compute_chunk(batch, metadata, following, hidden_RTD, memories)

    def _compute_chunk(self, batch, metadata, following, hidden_RTD, memories):
        if hidden_RTD is None:
            hidden_RTD = embed(self.model.model.embed_tokens, batch.tokens.gather(batch.input_ids_BN, metadata.chunk))
        hidden_RTD, memories = run_layers(self.layers, hidden_RTD, memories, metadata)
        memories = [
            _of_rows(memory, metadata.chunk, following.chunk) if memory and following else None for memory in memories
        ]
        if self.is_last:
            hidden_nD, target_n = batch.targets.of(self.model.model.norm(hidden_RTD), metadata.chunk)
            return cross_entropies(self.model.lm_head, hidden_nD, target_n, *batch.loss_options).sum(), memories
        return hidden_RTD, memories

    def _backward(
        self, batch: "_PipelineBatch", segments: list["_SegmentGraph"], num_items: int | torch.Tensor | None
    ) -> None:
        copied = self.tied_copy.weight if self.tied_copy and self.tied_copy.weight.requires_grad else None
        if copied is not None:
            earlier, copied.grad = copied.grad, None  # the earlier gradient is already the sum over both ranks
        # The batch's loss is linear in each segment's loss; the slope is the batch's loss for a segment's loss of 1.
        slope = batch.targets.mean(batch.like.new_ones((), dtype=batch.loss_dtype), num_items)
        arrivals = self.after.arrivals(batch.shapes[::-1], batch.like) if self.after else iter(())
        from_memories: list[torch.Tensor | None] = []
        of_embedded: list[torch.Tensor] = []
        while segments:
            segment = segments.pop()  # frees its graph
            gradients = [slope if self.is_last else next(arrivals), *from_memories]
            ends = [(end, gradient) for end, gradient in zip(segment.ends, gradients, strict=True) if end is not None]
            ends = [(end, gradient) for end, gradient in ends if gradient is not None]
            if ends:  # a segment without labels, or of frozen layers, has no gradient
                torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
            from_memories = [leaf.grad for leaf in segment.memories]
            if segment.received_RTD is not None:
                gradient_RTD = _gradient(segment.received_RTD)
                self.before.send(gradient_RTD) if self.before else of_embedded.append(gradient_RTD)
        if self.before:
            self.before.finish()
        if of_embedded and batch.embedded[0].requires_grad:
            torch.autograd.backward(batch.embedded[::-1], of_embedded)
        batch.weights.deliver()
        if copied is not None:
            copied.grad = self._sum_over_copies(_gradient(copied))
            if earlier is not None:
                copied.grad += earlier

    def _sum_over_copies(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        other = torch.empty_like(gradient)
        if self.is_first:  # one after the other: a send of nccl waits for its receive
            dist.send(gradient, group=self.group, group_dst=self.last_rank)
            dist.recv(other, group=self.group, group_src=self.last_rank)
        else:
            dist.recv(other, group=self.group, group_src=0)
            dist.send(gradient, group=self.group, group_dst=0)
        return gradient + other

    def _output(self, batch: "_PipelineBatch", num_items: int | torch.Tensor | None) -> CondenseOutput:
        losses_S = batch.like.new_empty(len(batch.chunks), dtype=batch.loss_dtype)
        if self.is_last:
            losses_S = torch.stack(batch.losses)
        dist.broadcast(losses_S, group=self.group, group_src=self.last_rank)
        return CondenseOutput(
            loss=batch.targets.mean(losses_S.sum(), num_items),
            segment_losses=losses_S,
            segment_targets=torch.tensor([batch.targets.number_in(metadata.chunk) for metadata in batch.chunks]),
        )


class _PipelineBatch:
    """The texts of one call, cut into the same chunks on every rank; the last rank collects `losses`."""

    def __init__(self, stage: PipelineStage, input_ids, labels, attention_mask):
        model = stage.model
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        self.input_ids_BN = check_input(model.config, given, labels)
        batch_size, num_columns = input_ids.shape
        self.tokens = UnpaddedBatch(batch_size, num_columns, real_tokens(attention_mask, num_columns))
        checkpointing = model.model.gradient_checkpointing and model.training and torch.is_grad_enabled()
        self.checkpoint = model.model._gradient_checkpointing_func if checkpointing else None
        self.targets = Targets(self.tokens, labels)
        vocab_size = model.config.vocab_size
        recompute = not checkpointing and vocab_size > model.config.hidden_size
        self.loss_options = max_tokens(vocab_size), recompute
        self.weights = SharedWeights(every_pass=True)
        weight = stage.layers[0].input_layernorm.weight  # quantized weights have other dtypes
        self.like = weight.new_empty(0, dtype=hidden_dtype(weight.dtype, weight.device))
        self.loss_dtype = torch.promote_types(self.like.dtype, torch.float32)
        state = TransientState.empty(batch_size, model.config)
        builder = model.model.metadata_builder(self.like, self.tokens, state)
        self.chunks = [builder.build(chunk) for chunk in state.positions.chunks(self.tokens.lengths)]
        self.shapes = [(len(one.chunk.rows), one.chunk.width, model.config.hidden_size) for one in self.chunks]
        self.losses: list[torch.Tensor] = []
        # An embedding that may depend on the whole input has one call, whose gradients wait for all segments.
        self.embed: ChunkEmbedder | None = None
        self.embedded: list[torch.Tensor] = []
        if stage.is_first and not is_by_token(model.model.embed_tokens):
            chunks = [metadata.chunk for metadata in self.chunks]
            self.embed = ChunkEmbedder(model.model.embed_tokens, self.input_ids_BN, self.tokens, chunks)
        check_not_empty(self.chunks)


@dataclass
class _SegmentGraph:
    """The graph of one segment for the backward pass: the leaves that it begins with, and its ends.

    `received_RTD` is None on the first rank. `memories` alternates keys and values. `ends`, the output and the new
    memories, are edges, which keep the graph but not the tensors: None for an end without a gradient.
    """

    received_RTD: torch.Tensor | None
    memories: list[torch.Tensor]
    ends: list[GradientEdge | None]


class _Border:
    """The messages between this rank and a neighbour, sent while both compute."""

    def __init__(self, neighbour: int, group: dist.ProcessGroup | None):
        self.neighbour, self.group = neighbour, group
        self.departing: torch.Tensor | None = None
        self.departure: dist.Work | None = None

    def send(self, tensor_RTD: torch.Tensor) -> None:
        """Sends a message. First waits until the previous one was received, so that messages do not accumulate."""
        self.finish()
        self.departing = tensor_RTD.contiguous()  # kept until it has been received
        self.departure = dist.isend(self.departing, group=self.group, group_dst=self.neighbour)

    def finish(self) -> None:
        if self.departure is not None:
            self.departure.wait()
        self.departing = self.departure = None

    def arrivals(self, shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the neighbour's tensors in turn; the next one may arrive while the caller works on this one."""
        expected: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
        for shape in (*shapes, None):
            if shape is not None:
                tensor_RTD = like.new_empty(shape)
                expected.append((tensor_RTD, dist.irecv(tensor_RTD, group=self.group, group_src=self.neighbour)))
            if len(expected) == 2 or shape is None:
                tensor_RTD, work = expected.popleft()
                assert work is not None  # this rank is in the group
                work.wait()
                yield tensor_RTD


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _tensors(memories: Memories) -> list[torch.Tensor]:
    return [tensor for memory in memories if memory for tensor in memory]


def _of_rows(memory: Memory, chunk: Chunk, following: Chunk) -> Memory:
    """Returns the memory without the rows whose text has ended."""
    if chunk.rows == following.rows:
        return memory
    kept = [chunk.rows.index(row) for row in following.rows]
    return memory.select(kept)
