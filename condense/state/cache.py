"""The state of texts that are being read: its size does not depend on their length.

Each layer has one buffer of keys and one of values for [memory ; current segment], and one of each for the keys and
values that the current segment will have as the next memory. Every row has its own position in its own segment.

Axes: B rows of a batch, R rows of a chunk, N recent tokens, T tokens of a chunk, D hidden size.
"""

import copy
from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..configuration import CondenseConfig
from ..durations import Timeline
from ..ops.transforms import autocast_dtype
from ..segmentation import Chunk, SegmentPositions, on_device
from .cache_layer import BUFFERS, FoldedCacheLayer
from .memory import Memory
from .recording import CROP_TOKENS, CacheSnapshot, Recording
from .state_file import read_state, write_state

# The fields that a cache and a model must have in common.
SHARED_FIELDS = (
    "segment_length", "position_anchor", "num_hidden_layers", "memory_shares", "sink_token_id", "num_key_value_heads",
    "head_dim", "hidden_size", "rope_parameters", "depth",
)  # fmt: skip


class FoldedCache(Cache):
    """The whole state of a `CondenseForCausalLM` after the texts read so far, in constant memory.

    Pass it as `cache` to continue after the last call. To branch, use `snapshot` and `restore`, or copy the
    cache with `copy.deepcopy`. To keep it, use `save` and `load`. After an interrupted call the cache is refused until
    a snapshot is restored.
    """

    def __init__(self, config: CondenseConfig):
        self.config = config
        super().__init__(layers=[])
        self.fixed_decoding: bool | str | None = None  # None: the model's own
        self.reset()

    def reset(self) -> None:
        """Removes all texts."""
        self.made_for = {name: copy.deepcopy(getattr(self.config, name)) for name in SHARED_FIELDS}
        length = self.config.segment_length
        self.layers = [FoldedCacheLayer(length) for _ in range(self.config.num_hidden_layers)]
        self.positions = SegmentPositions(0, length)
        self.timeline: Timeline | None = None
        # The final hidden state of each row's last token: columns of padding after it get its logits.
        self.last_hidden_BD: torch.Tensor | None = None
        self.computed_in: tuple[torch.dtype, torch.device] | None = None  # the model's at the first token
        self.num_columns = 0
        self.is_being_written = False  # remains true after a call that was interrupted
        self.static_decoding: object | None = None  # see condense.execution.static_decoding
        self.recording: Recording | None = None  # of the last tokens, for `crop`

    def detach(self) -> None:
        """Detaches the state from the graph of the calls so far."""
        for layer in self.layers:
            if layer.is_initialized:
                for name in BUFFERS:
                    setattr(layer, name, getattr(layer, name).detach())
        if self.last_hidden_BD is not None:
            self.last_hidden_BD = self.last_hidden_BD.detach()
        self._restart_recording()

    # Calls of the model

    def start(self, batch_size: int, like: torch.Tensor | None = None) -> "FoldedCache":
        """Prepares for a batch; raises `ValueError` if the cache holds a different number of texts.

        `like` has the device and the dtype of hidden states.
        """
        if self.last_hidden_BD is None:  # no token has been read
            self.positions = SegmentPositions(batch_size, self.config.segment_length)
            self.computed_in = None if like is None else _computes_in(like)
        elif self.batch_size != batch_size:
            raise ValueError(
                f"the cache holds {self.batch_size} texts and the input {batch_size}: pass the same rows again, "
                "a new FoldedCache, or for beams a cache after batch_repeat_interleave(num_beams)."
            )
        return self

    def check_complete(self) -> None:
        """Raises `ValueError` after an interrupted call: only some layers hold its tokens, or only some tokens."""
        if self.is_being_written:
            raise ValueError(
                "a call that wrote to this cache was interrupted, so only some of its tokens are there: reset() the "
                "cache, or take a snapshot() before a call that may fail and restore() it."
            )

    def begin_call(self) -> None:
        """Marks the state as incomplete until `end_call`."""
        self.is_being_written = True

    def end_call(self, num_columns: int, mask_BN: torch.Tensor | None = None) -> None:
        """Records the call's number of columns; `mask_BN` is false at padding."""
        if self.recording is not None:
            self.recording.add_columns(num_columns, mask_BN)
            if self.recording.rows_differ:
                self._restart_recording()
        self.num_columns += num_columns
        self.is_being_written = False

    def restart_columns(self) -> None:
        """Counts columns from 0 again, as for a new input; keeps the state."""
        self.num_columns = 0
        self._restart_recording()

    def check_fits(self, config: CondenseConfig) -> None:
        """Raises `ValueError` if the cache was made for another model."""
        for name, value in self.made_for.items():
            if value != getattr(config, name):
                raise ValueError(
                    f"the cache was made for {name}={value!r} and the model has {getattr(config, name)!r}: pass a "
                    "FoldedCache(model.config)."
                )

    def check_computes_alike(self, like: torch.Tensor) -> None:
        """Raises `ValueError` if the model has moved to another device or dtype since the first token."""
        if self.last_hidden_BD is None or self.computed_in is None:
            return
        (dtype, device), (own_dtype, own_device) = _computes_in(like), self.computed_in
        # Autocast casts the contents of the cache.
        if device != own_device or (dtype != own_dtype and dtype == like.dtype):
            raise ValueError(
                f"the cache was written in {own_dtype} on {own_device}, and the model computes in {dtype} on {device}: "
                "move the model before it reads the text, or begin again with FoldedCache(model.config)."
            )

    def key_values(self, chunk: Chunk) -> Sequence[FoldedCacheLayer]:
        self.begin_call()
        return self.layers

    def write_memory(self, memories: Sequence[Memory | None], chunk: Chunk) -> None:
        for layer, memory in zip(self.layers, memories, strict=True):
            if memory is not None:
                layer.write_memory(memory, chunk)
        self.roll(chunk)

    def roll(self, chunk: Chunk) -> None:
        """Starts the next segment of the rows that complete one with this chunk."""
        if self.recording is not None and chunk.completed_rows:
            timeline = None if self.timeline is None else self.timeline.before_roll
            self.recording.add_roll(self._copy_state(timeline))
        for layer in self.layers:
            layer.roll(chunk)

    def store_last_hidden(self, hidden_RTD: torch.Tensor, chunk: Chunk) -> None:
        """Stores the final hidden state of each row's last token so far."""
        if self.recording is not None:
            self.recording.add_hidden(hidden_RTD, chunk)
        if chunk.all_rows and chunk.rectangular:
            self.last_hidden_BD = hidden_RTD[:, -1].clone()
            return
        device = hidden_RTD.device
        last_R = on_device(torch.tensor(chunk.counts) - 1, device)
        last_RD = hidden_RTD[torch.arange(len(last_R), device=device), last_R]
        if self.last_hidden_BD is None:
            self.last_hidden_BD = hidden_RTD.new_zeros(chunk.batch_size, hidden_RTD.shape[-1])
        self.last_hidden_BD = self.last_hidden_BD.index_copy(0, on_device(torch.tensor(chunk.rows), device), last_RD)

    # Copies of the state

    def snapshot(self) -> CacheSnapshot:
        """Returns a copy of the state, which `restore` brings back any number of times. It is as large as the state.

        Raises `ValueError` for a cache that an interrupted call left incomplete.
        """
        self.check_complete()
        return self._copy_state(self.timeline)

    def _copy_state(self, timeline: Timeline | None) -> CacheSnapshot:
        return CacheSnapshot(
            made_for=self.made_for,
            buffers=[[buffer.clone() for buffer in layer.buffers] for layer in self.layers],
            positions=copy.deepcopy(self.positions),
            timeline=copy.copy(timeline),  # its tensors are replaced, never written
            last_hidden_BD=self.last_hidden_BD,  # likewise
            computed_in=self.computed_in,
            num_columns=self.num_columns,
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Restores the state at the time of a snapshot, also after an interrupted call.

        Under `torch.no_grad()` the buffers stay the same tensors, so a captured CUDA graph stays valid. Raises
        `ValueError` for a snapshot of another model's cache.
        """
        if snapshot.made_for != self.made_for:
            raise ValueError("the snapshot is from a cache of another model: restore one of this cache's own.")
        for layer, buffers in zip(self.layers, snapshot.buffers, strict=True):
            layer.restore(buffers)
        if len(snapshot.positions.offsets) != self.batch_size:
            self.static_decoding = None  # it would keep the old rows' buffers alive
        self.positions, self.timeline = copy.deepcopy(snapshot.positions), copy.copy(snapshot.timeline)
        self.last_hidden_BD, self.num_columns = snapshot.last_hidden_BD, snapshot.num_columns
        self.computed_in = snapshot.computed_in
        self.is_being_written = False
        self._restart_recording()

    def save(self, path: str | Path, model: Any) -> None:
        """Writes the state, which `model` computed, to a safetensors file: what a snapshot has.

        The file is complete or as it was before. Raises `ValueError` for a cache of another model, one that has read
        no token or that an interrupted call left incomplete, and a path that can't be written.
        """
        self.check_fits(model.config)
        write_state(self.snapshot(), path, model)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "FoldedCache":
        """Returns the cache of a file that `save` wrote, on the devices of `model`.

        Raises `ValueError` for another file, a damaged one, and a state of a model with other weights, another dtype or
        configuration.
        """
        cache = cls(model.config)
        cache.restore(read_state(path, model, cache.made_for))
        return cache

    # Removal of the last tokens, for assisted decoding

    @property
    def is_recording(self) -> bool:
        return self.recording is not None

    def activate_past_recording(self) -> None:
        """Makes the cache keep the data for `crop` from now on: a copy of the state before each of the last rolls."""
        if self.recording is None:
            self.recording = Recording(self.config.segment_length, self.last_hidden_BD)

    def deactivate_past_recording(self) -> None:
        self.recording = None

    def _restart_recording(self) -> None:
        """Stops keeping the data for `crop`: tokens read so far can no longer be removed."""
        if self.recording is not None:
            self.recording = Recording(self.config.segment_length, self.last_hidden_BD)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` columns of the input, as transformers' caches do.

        Raises `ValueError` for more than `CROP_TOKENS`, after an interrupted call, and for columns that were read
        before `activate_past_recording`, with gradients, or with different padding in each row.
        """
        num_columns = -index(tokens_to_remove)  # transformers may pass a tensor
        if num_columns == 0:
            return
        self.check_complete()
        num_recorded = 0 if self.recording is None else len(self.recording.columns)
        if self.recording is None or not 0 < num_columns <= num_recorded:
            raise ValueError(
                f"crop({tokens_to_remove}): the cache can remove the last {num_recorded} tokens, at most "
                f"{CROP_TOKENS}, with crop(-k). Call activate_past_recording() before the tokens, with the same "
                "padding in all rows, or restore a snapshot()."
            )
        if any(tensor.requires_grad for tensor in self._tensors()):
            raise ValueError("crop can't remove tokens that were read with gradients: read them under torch.no_grad().")
        self.num_columns -= num_columns
        if num_tokens := self.recording.remove_columns(num_columns):
            self.last_hidden_BD = self.recording.remove_hidden(num_tokens)
            if self.last_hidden_BD is None:
                self._remove_all(self.recording)
            else:
                self._move_back(num_tokens, self.recording)

    def _move_back(self, num_tokens: int, recording: Recording) -> None:
        """Restores the state of the segment that each row was in `num_tokens` tokens ago, and its offset there.

        Keys and values after the offset stay in the buffers: the next tokens replace them.
        """
        offset, rolled = self.positions.offsets[0] - num_tokens, None
        while offset < 0:  # the tokens begin in an earlier segment
            offset, rolled = offset + self.config.segment_length, recording.rolls.pop()
        if rolled is not None:
            for layer, buffers in zip(self.layers, rolled.buffers, strict=True):
                layer.restore(buffers)
            self.positions, self.timeline = rolled.positions, rolled.timeline
        self.positions.offsets = [offset] * self.batch_size
        if self.timeline is not None:
            self.timeline = copy.copy(self.timeline)
            self.timeline.crop(self.positions.offsets)

    def _remove_all(self, recording: Recording) -> None:
        """Restores the state before the first token."""
        for layer in self.layers:
            layer.restore([])
        self.positions = SegmentPositions(self.batch_size, self.config.segment_length)
        self.timeline = None
        recording.rolls = []

    def __deepcopy__(self, memo: dict) -> "FoldedCache":
        if any(tensor.grad_fn is not None for tensor in self._tensors()):
            raise ValueError(
                "the cache was written with gradients, which a copy can't have: call cache.detach() first, or read "
                "under torch.no_grad()."
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [] if self.last_hidden_BD is None else [self.last_hidden_BD]
        tensors += [buffer for layer in self.layers for buffer in layer.buffers]
        return tensors + (self.recording.tensors if self.recording is not None else [])

    @property
    def num_bytes(self) -> int:
        """Returns the size of all rows' state in bytes."""
        tensors = self._tensors() + ([] if self.timeline is None else self.timeline.tensors)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    # The rest of transformers' interface

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of input columns seen, padding included."""
        return self.num_columns

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove tokens that are read from now on."""
        return self.is_recording

    @property
    def batch_size(self) -> int:
        return len(self.positions.offsets)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Makes row i a copy of row `indices[i]`; booleans keep the rows that are true. An empty cache stays empty.

        Raises `ValueError` for rows that the cache does not have, and after an interrupted call.
        """
        if not self.is_initialized:
            return
        self.check_complete()
        rows_B = self._rows_at(torch.as_tensor(indices).cpu())
        self.begin_call()
        self.positions.select(rows_B.tolist())
        self.static_decoding = None  # it would keep the old rows' buffers alive
        for layer in self.layers:
            layer.select(rows_B)
        if self.timeline is not None:
            self.timeline.select(rows_B)
        if self.last_hidden_BD is not None:
            self.last_hidden_BD = self.last_hidden_BD[rows_B.to(self.last_hidden_BD.device)]
        self._restart_recording()
        self.is_being_written = False

    def _rows_at(self, indices: torch.Tensor) -> torch.Tensor:
        try:
            rows_B = torch.arange(self.batch_size)[indices]
        except IndexError:
            rows_B = None
        if rows_B is None or rows_B.dim() != 1 or not len(rows_B):
            raise ValueError(
                f"rows {indices.tolist()} of a cache with {self.batch_size} texts: pass a list of indices from 0 to "
                f"{self.batch_size - 1}, or one boolean for each text."
            )
        return rows_B

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)


def _computes_in(like: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """Returns the dtype of keys, which is autocast's if it is on, and their device."""
    return autocast_dtype(like.device) or like.dtype, like.device
