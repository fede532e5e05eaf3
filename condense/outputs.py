"""The output of a call, built from the last layer's outputs.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, D hidden size, S chunks.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .call import Call
from .execution.checkpointing import storage_of
from .execution.executor import ChunkOutput
from .hidden_states import HiddenStateAccumulator
from .loss import LossAccumulator, Targets
from .ops.linear import apply_linear
from .ops.transforms import has_hooks
from .segmentation import Chunk


@dataclass
class CondenseModelOutput(BaseModelOutputWithPast):
    """The output of the model without a head. `function_evaluations`: see `CondenseOutput`."""

    function_evaluations: torch.Tensor | None = None  # [B, N]


@dataclass
class CondenseOutput(CausalLMOutputWithPast):
    """The output of a causal language model. With labels it also has the parts of the loss, chunk by chunk; a call
    without a cache has one chunk per segment.

    `segment_losses[s]` is the sum (not the mean) of the cross-entropies of the tokens that chunk s predicts, over all
    rows, detached. `segment_targets[s]` is the number of these tokens.

    `function_evaluations` are the evaluations of a depth block's field at each token, 0 at padding; None without one.
    """

    segment_losses: torch.Tensor | None = None  # [S]
    segment_targets: torch.Tensor | None = None  # [S]
    function_evaluations: torch.Tensor | None = None  # [B, N]


class OutputAccumulator:
    """The loss and the logits of a call, from the last layer's outputs.

    These come chunk by chunk, outside of any checkpoint. The last `num_kept` columns have logits or, without a head,
    final hidden states; None for no columns.
    """

    def __init__(
        self,
        norm: nn.Module,
        head: nn.Module | None,
        vocab_size: int,
        call: Call,
        labels_BN: torch.Tensor | None,
        num_kept: int | None,
    ):
        self.norm, self.head, self.cache = norm, head, call.cache
        self.hidden = None if num_kept is None else HiddenStateAccumulator(call.batch, num_kept)
        self.kept: list[tuple[Chunk, torch.Tensor]] = []
        self.chunks: list[Chunk] = []
        # A norm with hooks is called chunk by chunk, and once.
        self.normalizes = self.hidden is not None or self.cache is not None or has_hooks(norm)
        self.loss = None
        if labels_BN is not None:
            assert head is not None
            targets = Targets(call.batch, labels_BN)
            self.loss = LossAccumulator(None if self.normalizes else norm, head, vocab_size, targets)
        # The gradients of the hidden states wait for the backward pass with the segment's memories.
        at_once = self.loss is not None and self.loss.gradients is not None
        self.storage = storage_of(call.checkpoint_function) if at_once else nullcontext()

    def add(self, outputs: Iterable[ChunkOutput]) -> None:
        """Accepts the last layer's output [R, T, D] for each of the next chunks."""
        for chunk, hidden_RTD in outputs:
            self.chunks.append(chunk)
            if self.normalizes:
                hidden_RTD = self.norm(hidden_RTD)
                if self.cache is not None:
                    self.cache.store_last_hidden(hidden_RTD, chunk)
            if self.hidden is not None:
                self.kept.append((chunk, self.hidden.chunk_hidden(hidden_RTD, chunk)))
            if self.loss is not None:
                with self.storage:
                    self.loss.add(hidden_RTD, chunk)

    def finish(self) -> None:
        """Computes the waiting losses, while the weights are available."""
        if self.loss is not None:
            with self.storage:
                self.loss.take_block()

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that the output is computed from. Hooks of FSDP and of ZeRO-3 replace them."""
        return [*([] if self.loss is None else self.loss.block_losses), *(hidden for _, hidden in self.kept)]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces the tensors of `tensors`."""
        rest = list(tensors)
        if self.loss is not None:
            number = len(self.loss.block_losses)
            self.loss.block_losses, rest = rest[:number], rest[number:]
        self.kept = [(chunk, hidden) for (chunk, _), hidden in zip(self.kept, rest, strict=True)]

    def last_hidden(self, previous_last_hidden_BD: torch.Tensor) -> torch.Tensor:
        """Returns the final hidden states [B, C, D] of the kept columns."""
        assert self.hidden is not None
        return self.hidden.collect(self.kept, previous_last_hidden_BD)

    def build_output(self, previous_last_hidden_BD: torch.Tensor, num_items_in_batch) -> CondenseOutput:
        output = CondenseOutput()
        if self.loss is not None:
            output.loss = self.loss.loss(num_items_in_batch)
            output.segment_losses = torch.stack(self.loss.chunk_losses)
            output.segment_targets = torch.tensor([self.loss.targets.number_in(chunk) for chunk in self.chunks])
        if self.hidden is not None:
            assert self.head is not None
            output.logits = apply_linear(self.head, self.last_hidden(previous_last_hidden_BD))
        return output
