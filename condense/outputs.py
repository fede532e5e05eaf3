"""What a call returns, from the normed hidden states of its chunks.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, D hidden size, S chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .call import Call
from .execution.executor import ChunkOutput
from .hidden_states import HiddenStateAccumulator
from .loss import LossAccumulator
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
    """The loss and the logits of a call."""

    def __init__(
        self, head: nn.Module, vocab_size: int, call: Call, labels_BN: torch.Tensor | None, logits_to_keep: int | None
    ):
        self.head, self.loss, self.hidden = head, None, None
        if labels_BN is not None:
            once = call.checkpoint_function is None  # a checkpoint computes a chunk twice
            recompute = once or call.checkpoint_segments > 1
            self.loss = LossAccumulator(head, vocab_size, call.batch, labels_BN, recompute=recompute, at_once=once)
        if labels_BN is None or logits_to_keep is not None:
            self.hidden = HiddenStateAccumulator(call.batch, logits_to_keep or call.batch.num_columns)

    def process_chunk(self, normed_RTD: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The chunk's loss, and the hidden states that logits are computed from."""
        return (
            None if self.loss is None else self.loss.chunk_loss(normed_RTD, chunk),
            None if self.hidden is None else self.hidden.chunk_hidden(normed_RTD, chunk),
        )

    def build_output(
        self, chunk_outputs: Sequence[ChunkOutput], previous_last_hidden_BD: torch.Tensor, num_items_in_batch
    ) -> CondenseOutput:
        """The output of the call, from the results of `process_chunk`."""
        output = CondenseOutput()
        if self.loss is not None:
            losses = [loss for _, (loss, _) in chunk_outputs]
            output.loss = self.loss.batch_loss(losses, num_items_in_batch)
            output.segment_losses = torch.stack([loss.detach() for loss in losses])
            output.segment_targets = torch.tensor([self.loss.num_targets_of(chunk) for chunk, _ in chunk_outputs])
        if self.hidden is not None:
            hidden = [(chunk, hidden) for chunk, (_, hidden) in chunk_outputs]
            output.logits = self.head(self.hidden.collect(hidden, previous_last_hidden_BD))
        return output
