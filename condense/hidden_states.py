"""The hidden states of the columns whose logits a call returns, chunk by chunk.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, C columns kept, D hidden size,
n selected tokens.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .call import Call
from .segmentation import Chunk, UnpaddedBatch, on_device


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
