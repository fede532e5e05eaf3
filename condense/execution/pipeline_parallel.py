"""The layers of a model spread over processes: rank r works on segment s while rank r + 1 works on s - 1.

    rank 0   s0  s1  s2  s3
    rank 1       s0  s1  s2  s3
    rank 2           s0  s1  s2  s3

Every rank holds a contiguous range of layers; the first one also embeds, the last one has norm, head and
loss. What a layer remembers stays on its rank, so only the hidden states of a segment travel, one message
per segment and border, and in training their gradients back. The wait until every rank has work is paid
once per text and direction, however many segments follow.

Each rank cuts its graph where a tensor comes in: the hidden states from the rank before, the memories from
the segment before. The backward pass takes the segments in reverse, each with one call of autograd that
leads from its hidden states and memories to the tensors that came in, whose gradients travel on.

Axes: B rows, R rows taking part in a step, N columns of an input, T tokens of a step, D model width, S steps.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..checks import check_input, real_tokens
from ..layers import Step
from ..memory import Memory, TransientMemory
from ..modeling import CondenseForCausalLM, CondenseOutput
from ..readers import LossReader
from ..segmentation import Alignment, Piece

Memories = list[Memory | None]  # of this rank's layers, in order


class Stage:
    """This process's share of a model whose layers are spread over a process group.

        torch.distributed.init_process_group("nccl")
        model = CondenseForCausalLM.from_pretrained(llama, segment_length=512)
        stage = Stage(model)
        model.to(device)  # only now, when the other ranks' layers are gone
        stage.loss_and_gradients(input_ids, labels)

    Puts `nn.Identity` in place of what other ranks hold. Names stay: `model.parameters()` are this rank's own,
    and the state dicts of all ranks make up the checkpoint. A tied embedding is held by the first and the last
    rank, with the same gradient: the copies stay equal if both are updated alike, so clip gradients by their
    norm over all ranks.

    `layers_per_rank`: by default as even as can be, the first ranks taking one more; the head costs the last rank
    as much as a layer or more. `group`: by default all processes. Under nccl let it be initialised without
    `device_id`: with one, messages of different borders wait for each other.

    Raises `ValueError` where `layers_per_rank` does not fit the model and the group.
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
                f"layers_per_rank={list(layers_per_rank)} does not spread {num_layers} layers over {num_ranks} ranks: "
                "pass a number of at least 1 per rank that add up to the model's layers, or start fewer processes."
            )
        self.model, self.group, self.last_rank = model, group, num_ranks - 1
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1
        self.before = None if self.is_first else _Border(rank - 1, group)
        self.after = None if self.is_last else _Border(rank + 1, group)

        self.tied_copy: nn.Embedding | nn.Linear | None = None  # whose weight the rank at the other end has as well
        if model.lm_head.weight is model.model.embed_tokens.weight and self.is_first != self.is_last:
            self.tied_copy = model.model.embed_tokens if self.is_first else model.lm_head

        begin = sum(layers_per_rank[:rank])
        own = range(begin, begin + layers_per_rank[rank])
        self.layers = [model.model.layers[n] for n in own]
        elsewhere = [f"model.layers.{n}" for n in range(num_layers) if n not in own]
        elsewhere += [] if self.is_first else ["model.embed_tokens"]
        elsewhere += [] if self.is_last else ["model.norm", "lm_head"]
        for name in elsewhere:
            model.set_submodule(name, nn.Identity())

    @torch.no_grad()
    def loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> CondenseOutput:
        """`loss`, `segment_losses` [S] and `segment_targets` [S], on every rank what the whole model would give.

        input_ids, labels and attention_mask [B, N] as for `CondenseForCausalLM.forward`, the same on all ranks.
        Raises `ValueError`, on all ranks, for inputs that do not fit together.
        """
        batch = _Batch(self.model, input_ids, labels, attention_mask)
        for _ in self._forward(batch):
            pass  # nothing is kept
        return self._output(batch, None)

    @torch.enable_grad()
    def loss_and_gradients(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> CondenseOutput:
        """As `loss`, and adds its gradients to those of this rank's parameters: no `backward` is left to call.

        The loss is the mean over all labels, or their sum over `num_items_in_batch`. With the model's gradient
        checkpointing a segment keeps the hidden states and memories that came in; all else is computed again.
        """
        batch = _Batch(self.model, input_ids, labels, attention_mask)
        self._backward(batch, list(self._forward(batch)), num_items_in_batch)
        return self._output(batch, num_items_in_batch)

    def _forward(self, batch: "_Batch") -> Iterator["_Segment"]:
        memories: Memories = [None] * len(self.layers)
        arrivals = self.before.arrivals(batch.shapes, batch.like) if self.before else iter(())
        for step, following in zip(batch.steps, [*batch.steps[1:], None], strict=True):
            came_in_RTD = None if self.is_first else _leaf(next(arrivals))
            run = partial(self._run_step, batch, step, following)
            if batch.checkpointing:
                # The tables tell the checkpoint on which device to keep the state of random numbers, for dropout.
                output, remembered = self.model._gradient_checkpointing_func(run, came_in_RTD, memories, step.rotary)
            else:
                output, remembered = run(came_in_RTD, memories)
            if self.after:
                self.after.send(output.detach())
            else:
                batch.losses.append(output.detach())
            ends = [get_gradient_edge(end) if end.requires_grad else None for end in (output, *_tensors(remembered))]
            yield _Segment(came_in_RTD, _tensors(memories), ends)
            memories = [memory and Memory(*map(_leaf, memory)) for memory in remembered]
        if self.after:
            self.after.finish()

    def _run_step(self, batch: "_Batch", step: Step, following: Step | None, hidden_RTD, memories, _tables=None):
        """The output, hidden states [R, T, D] or on the last rank the loss, and what the following step reads."""
        if self.is_first:
            hidden_RTD = self.model.model.embed_tokens(batch.alignment.take(batch.input_ids_BN, step.piece))
        remembered: Memories = []
        for layer, past in zip(self.layers, memories, strict=True):
            hidden_RTD, memory = layer(hidden_RTD, past, step)
            remembered.append(_of_rows(memory, step.piece, following.piece) if memory and following else None)
        if self.is_last:
            return batch.reader.read(self.model.model.norm(hidden_RTD), step.piece), remembered
        return hidden_RTD, remembered

    def _backward(self, batch: "_Batch", segments: list["_Segment"], num_items: int | torch.Tensor | None) -> None:
        copied = self.tied_copy.weight if self.tied_copy and self.tied_copy.weight.requires_grad else None
        if copied is not None:
            earlier, copied.grad = copied.grad, None  # what was there is summed over both ranks already
        # The whole loss is linear in that of each segment: the slope is what a loss of 1 comes to.
        slope = batch.reader.finish([batch.like.new_ones((), dtype=batch.loss_dtype)], num_items)
        arrivals = self.after.arrivals(batch.shapes[::-1], batch.like) if self.after else iter(())
        from_memories: list[torch.Tensor | None] = []
        while segments:
            segment = segments.pop()  # its graph goes with it
            gradients = [slope if self.is_last else next(arrivals), *from_memories]
            ends = [(end, gradient) for end, gradient in zip(segment.ends, gradients, strict=True) if end is not None]
            ends = [(end, gradient) for end, gradient in ends if gradient is not None]
            if ends:  # nothing leads back from a segment without labels, or from frozen layers
                torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
            from_memories = [leaf.grad for leaf in segment.memories]
            if self.before and segment.came_in_RTD is not None:
                self.before.send(_gradient(segment.came_in_RTD))
        if self.before:
            self.before.finish()
        if copied is not None:
            copied.grad = self._sum_over_copies(_gradient(copied))
            if earlier is not None:
                copied.grad += earlier

    def _sum_over_copies(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        other = torch.empty_like(gradient)
        if self.is_first:  # one after the other, since nccl sends nothing that is not being received
            dist.send(gradient, group=self.group, group_dst=self.last_rank)
            dist.recv(other, group=self.group, group_src=self.last_rank)
        else:
            dist.recv(other, group=self.group, group_src=0)
            dist.send(gradient, group=self.group, group_dst=0)
        return gradient + other

    def _output(self, batch: "_Batch", num_items: int | torch.Tensor | None) -> CondenseOutput:
        losses_S = batch.like.new_empty(len(batch.steps), dtype=batch.loss_dtype)
        if self.is_last:
            losses_S = torch.stack(batch.losses)
        dist.broadcast(losses_S, group=self.group, group_src=self.last_rank)
        return CondenseOutput(
            loss=batch.reader.finish(list(losses_S), num_items),
            segment_losses=losses_S,
            segment_targets=torch.tensor([batch.reader.num_targets_of(step.piece) for step in batch.steps]),
        )


class _Batch:
    """The texts of one call, cut into the same steps on every rank; `losses` fills on the last."""

    def __init__(self, model: CondenseForCausalLM, input_ids, labels, attention_mask):
        self.input_ids_BN = check_input(model.config, input_ids, None, attention_mask, None, None, labels, None, None)
        batch_size, num_columns = input_ids.shape
        self.alignment = Alignment(batch_size, num_columns, real_tokens(attention_mask, num_columns))
        self.checkpointing = model.gradient_checkpointing and model.training and torch.is_grad_enabled()
        self.reader = LossReader(
            model.lm_head, model.config.vocab_size, self.alignment, labels, recompute=not self.checkpointing
        )
        self.like = next(model.model.layers.parameters())
        self.loss_dtype = torch.promote_types(self.like.dtype, torch.float32)
        state = TransientMemory(batch_size, model.config)
        self.steps = list(model.model.steps(self.alignment, state, None, self.like, keeps_state=False))
        self.shapes = [(len(step.piece.rows), step.piece.width, model.config.hidden_size) for step in self.steps]
        self.losses: list[torch.Tensor] = []
        if not self.steps:
            self.reader.finish([], None)  # says why there is no loss


@dataclass
class _Segment:
    """What the backward pass needs: the leaves with which the segment's graph begins, and its ends.

    `came_in_RTD` is None on the first rank. `memories` are keys and values in turn; `ends`, the output and what is
    remembered, are edges, which hold the graph but not the tensors: None where no gradient leads back.
    """

    came_in_RTD: torch.Tensor | None
    memories: list[torch.Tensor]
    ends: list[GradientEdge | None]


class _Border:
    """What travels between this rank and a neighbour while both compute."""

    def __init__(self, neighbour: int, group: dist.ProcessGroup | None):
        self.neighbour, self.group = neighbour, group
        self.departing: torch.Tensor | None = None
        self.departure: dist.Work | None = None

    def send(self, tensor_RTD: torch.Tensor) -> None:
        """Waits for the message before to be taken, so that they do not pile up, and not for this one."""
        self.finish()
        self.departing = tensor_RTD.contiguous()  # kept until it is gone
        self.departure = dist.isend(self.departing, group=self.group, group_dst=self.neighbour)

    def finish(self) -> None:
        if self.departure is not None:
            self.departure.wait()
        self.departing = self.departure = None

    def arrivals(self, shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> Iterator[torch.Tensor]:
        """The neighbour's tensors in turn; the next one may come in while this one is worked on."""
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


def _of_rows(memory: Memory, piece: Piece, following: Piece) -> Memory:
    """Without the rows whose text has ended."""
    if piece.rows == following.rows:
        return memory
    kept = [piece.rows.index(row) for row in following.rows]
    return Memory(memory.key_RGKE[kept], memory.value_RGKE[kept])
