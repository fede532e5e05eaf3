"""The output of a call, built chunk by chunk from the last layer's outputs, and from all layers' if requested.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, C columns kept, D hidden size, S
chunks, n selected tokens.
"""

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .call import Call
from .execution.checkpointing import storage_of
from .execution.executor import ChunkOutput
from .loss import LossAccumulator, Targets
from .ops.linear import apply_linear
from .ops.transforms import has_hooks
from .segmentation import Chunk, UnpaddedBatch, on_device


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


class HiddenStateAccumulator:
    """The hidden states of the last `num_kept` columns; a column of padding repeats its row's last token."""

    def __init__(self, batch: UnpaddedBatch, num_kept: int):
        self.batch, self.first_column = batch, batch.num_columns - num_kept
        self.token_BC = batch.last_token_indices()[:, -num_kept:]

    def _selection(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns indices (r, c, t): kept column c of the chunk's row r is its token t."""
        token_RC = self.token_BC[chunk.rows] - torch.tensor(chunk.starts)[:, None]
        r, c = ((token_RC >= 0) & (token_RC < torch.tensor(chunk.counts)[:, None])).nonzero(as_tuple=True)
        return r, c, token_RC[r, c]

    def chunk_hidden(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Returns the hidden states of the chunk's tokens in kept columns: [R, T, D] if these are the same columns in
        all rows, otherwise [n, D].
        """
        if (columns := self.batch.shared_columns(chunk)) is not None:
            skipped = self.first_column - columns.start
            return hidden_RTD[:, skipped if skipped > 0 else 0 :].clone()  # a view would keep all hidden states alive
        r, _, t = self._selection(chunk)
        return hidden_RTD[on_device(r, hidden_RTD.device), on_device(t, hidden_RTD.device)]

    def collect(
        self, chunk_hidden: Sequence[tuple[Chunk, torch.Tensor]], previous_last_hidden_BD: torch.Tensor
    ) -> torch.Tensor:
        """Returns [B, C, D]; columns before a row's first token of this input have `previous_last_hidden_BD`."""
        batch_size, num_kept = self.token_BC.shape
        if chunk_hidden and all(self.batch.shared_columns(chunk) is not None for chunk, _ in chunk_hidden):
            return torch.cat([hidden_RTD for _, hidden_RTD in chunk_hidden], dim=1)
        kept_nD = previous_last_hidden_BD.repeat_interleave(num_kept, dim=0)
        if chunk_hidden:
            indices = []
            for chunk, _ in chunk_hidden:
                r, c, _ = self._selection(chunk)
                indices.append(torch.tensor(chunk.rows)[r] * num_kept + c)
            hidden_nD = torch.cat([hidden.flatten(0, -2) for _, hidden in chunk_hidden])
            kept_nD = kept_nD.index_copy(0, on_device(torch.cat(indices), kept_nD.device), hidden_nD)
        return kept_nD.unflatten(0, (batch_size, num_kept))


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


class LayerOutputs:
    """The hidden states between the layers of one call, recorded by hooks if they are requested.

    Hooks also make "auto" choose the sequential order; a wave calls no layer. Raises `ValueError` under gradient
    checkpointing, which computes the layers twice, and for the schedules "wavefront" and "graph".
    """

    def __init__(self, model: Any, call: Call, requested: bool | None):
        self.model, self.batch, self.hooks = model, call.batch, list[Any]()
        self.thread = threading.get_ident()  # other threads may call the same model
        self.requested = model.config.output_hidden_states if requested is None else requested
        self.chunks: list[Chunk] = []
        self.recorded: list[list[torch.Tensor]] = [[] for _ in range(len(model.layers_in_use) + 1)]
        schedule = model.config.schedule
        if self.requested and (call.checkpoint_function is not None or schedule in ("wavefront", "graph")):
            other = "gradient checkpointing" if call.checkpoint_function is not None else f"schedule={schedule!r}"
            raise ValueError(
                f"output_hidden_states, in the call or the configuration, with {other}: use one of the two."
            )

    def __enter__(self) -> "LayerOutputs":
        if self.requested:
            *inputs, last = self.recorded
            for layer, recorded in zip(self.model.layers_in_use, inputs, strict=True):
                self.hooks.append(layer.register_forward_pre_hook(partial(self._record_input, recorded)))
            self.hooks.append(self.model.norm.register_forward_hook(partial(self._record_output, last)))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _record_input(self, recorded: list[torch.Tensor], layer: Any, given: tuple) -> None:
        hidden_RTD, _, metadata = given
        if threading.get_ident() == self.thread and not metadata.is_sink:
            recorded.append(hidden_RTD)
            if recorded is self.recorded[0]:
                self.chunks.append(metadata.chunk)

    def _record_output(self, recorded: list[torch.Tensor], _: Any, given: tuple, output: torch.Tensor) -> None:
        if threading.get_ident() == self.thread:
            recorded.append(output)

    def hidden_states(self, previous_last_hidden_BD: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Returns each layer's input and the final norm's output, [B, N, D] each, or None if not requested."""
        if not self.requested:
            return None
        every = HiddenStateAccumulator(self.batch, self.batch.num_columns)

        def collect(recorded: list[torch.Tensor], previous_BD: torch.Tensor) -> torch.Tensor:
            pairs = zip(self.chunks, recorded, strict=True)
            return every.collect([(chunk, every.chunk_hidden(hidden, chunk)) for chunk, hidden in pairs], previous_BD)

        *inputs, last = self.recorded
        zeros_BD = torch.zeros_like(previous_last_hidden_BD)
        return (*[collect(recorded, zeros_BD) for recorded in inputs], collect(last, previous_last_hidden_BD))
