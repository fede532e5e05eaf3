"""The state of a text being read: its size does not depend on how much has been read.

Per layer: one buffer of keys and one of values for [memory ; current segment], and one of each for what
becomes the next memory. Every row has its own place in its own segment.

Axes: B rows, R rows taking part in a step, G key/value heads, L segment length, T tokens of a step,
K visible keys, D model width, E head width.
"""

import copy
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration import CondenseConfig
from .durations import Timeline
from .memory import Memory
from .segmentation import Cursor, Piece, on_device

# What a cache and a model must have in common.
SHARED_FIELDS = (
    "segment_length", "memory_source", "position_anchor", "num_hidden_layers", "num_key_value_heads", "head_dim",
    "hidden_size", "rope_parameters",
)  # fmt: skip


class FoldedCacheLayer(CacheLayerMixin):
    """One layer's buffers: `keys`, `values` [B, G, 2L, E] and `next_keys`, `next_values` [B, G, L, E]."""

    is_sliding = False

    keys: torch.Tensor
    values: torch.Tensor
    next_keys: torch.Tensor
    next_values: torch.Tensor

    def __init__(self, segment_length: int):
        super().__init__()
        self.segment_length = segment_length

    def lazy_initialization(self, key_states, value_states) -> None:
        batch_size, num_heads, _, head_dim = key_states.shape
        current = (batch_size, num_heads, 2 * self.segment_length, head_dim)
        following = (batch_size, num_heads, self.segment_length, head_dim)
        self.keys, self.values = key_states.new_zeros(current), value_states.new_zeros(current)
        self.next_keys, self.next_values = key_states.new_zeros(following), value_states.new_zeros(following)
        self.is_initialized = True

    def extend(self, key_RGTE, value_RGTE, piece: Piece):
        """Stores a step's keys and values; returns all [R, G, K, E] that its queries may see.

        For a uniform piece those are views that end with the step's own tokens; otherwise whole buffers.
        """
        self._make_room(key_RGTE, value_RGTE, piece)
        self.keys = _write(self.keys, key_RGTE, piece, self.segment_length)
        self.values = _write(self.values, value_RGTE, piece, self.segment_length)
        visible = piece.visible_keys if piece.uniform else slice(None)
        return tuple(
            (buffer if piece.all_rows else buffer[piece.rows])[:, :, visible] for buffer in (self.keys, self.values)
        )

    def _make_room(self, key_RGTE, value_RGTE, piece: Piece) -> None:
        if not self.is_initialized:
            all_rows = (piece.batch_size, -1, -1, -1)
            self.lazy_initialization(key_RGTE[:1].expand(all_rows), value_RGTE[:1].expand(all_rows))

    def memory(self, piece: Piece) -> Memory | None:
        if not self.is_initialized or piece.memory_lengths[0] == 0:
            return None
        rows = slice(None) if piece.all_rows else piece.rows
        return Memory(*(buffer[rows, :, : self.segment_length] for buffer in (self.keys, self.values)))

    def remember(self, memory: Memory, piece: Piece) -> None:
        """Stores what the step's tokens will be in the next memory, and rolls rows over that are complete."""
        self._make_room(*memory, piece)
        self.next_keys = _write(self.next_keys, memory.key_RGKE, piece)
        self.next_values = _write(self.next_values, memory.value_RGKE, piece)
        self.roll(piece)

    def roll(self, piece: Piece) -> None:
        """What the piece's complete rows were to remember becomes their memory."""
        if piece.completed:
            self.keys = self._roll(self.keys, self.next_keys, piece)
            self.values = self._roll(self.values, self.next_values, piece)

    def _roll(self, buffer_BG2LE, next_BGLE, piece: Piece):
        rolled = _writable(buffer_BG2LE)
        completed = (
            slice(None) if len(piece.completed) == piece.batch_size else [piece.rows[r] for r in piece.completed]
        )
        rolled[completed, :, : self.segment_length] = next_BGLE[completed]
        return rolled

    def select(self, rows_B: torch.Tensor) -> None:
        if self.is_initialized:
            for name in ("keys", "values", "next_keys", "next_values"):
                buffer = getattr(self, name)
                setattr(self, name, buffer.index_select(0, rows_B.to(buffer.device)))

    # The rest of transformers' interface for a layer; the cache keeps count for all layers.

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError("a FoldedCache belongs to a CondenseForCausalLM: other models cannot write to it.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 2 * self.segment_length, 0

    def get_seq_length(self) -> int:
        raise TypeError("the cache counts tokens, not its layers: use FoldedCache.get_seq_length().")

    def get_max_length(self) -> int:
        return -1


class FoldedCache(Cache):
    """Everything a `CondenseForCausalLM` knows of the texts read so far, in constant memory.

    Pass it as `past_key_values` to continue where the last call stopped. It cannot roll back: to branch, take a
    `copy.deepcopy` first. A call that is interrupted leaves a cache that is refused from then on.
    """

    def __init__(self, config: CondenseConfig):
        self.config = config
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.made_for = {name: copy.deepcopy(getattr(self.config, name)) for name in SHARED_FIELDS}
        length = self.config.segment_length
        self.layers = [FoldedCacheLayer(length) for _ in range(self.config.num_hidden_layers)]
        self.cursor = Cursor(0, length)
        self.timeline: Timeline | None = None
        # Final hidden state of each row's last token: what a column of padding after it answers with.
        self.last_hidden_BD: torch.Tensor | None = None
        self.num_columns = 0
        self.is_being_written = False  # remains true after a call that was interrupted
        self.fixed_step: object | None = None  # see condense.execution.cuda_graph

    def detach(self) -> None:
        """Lets no gradient of what follows reach what has been read; its graph can go."""
        for layer in self.layers:
            if layer.is_initialized:
                for name in ("keys", "values", "next_keys", "next_values"):
                    setattr(layer, name, getattr(layer, name).detach())
        if self.last_hidden_BD is not None:
            self.last_hidden_BD = self.last_hidden_BD.detach()

    def start(self, batch_size: int) -> "FoldedCache":
        """Makes room for a batch, or checks that it is the one being read."""
        if self.last_hidden_BD is None:  # nothing was read, whatever was refused
            self.cursor = Cursor(batch_size, self.config.segment_length)
        elif self.batch_size != batch_size:
            raise ValueError(
                f"the cache holds {self.batch_size} texts and the input {batch_size}: pass the same rows again, "
                "a new FoldedCache, or for beams a cache after batch_repeat_interleave(num_beams)."
            )
        return self

    def check_complete(self) -> None:
        """Raises `ValueError` after a call that was interrupted: some of its tokens were read, or some layers did."""
        if self.is_being_written:
            raise ValueError(
                "a call that wrote to this cache was interrupted, so it holds a part of that call's tokens: begin "
                "again with FoldedCache(config) or reset(), or take a copy.deepcopy before a call that may fail."
            )

    def begin_call(self) -> None:
        """What follows changes the state: until `end_call` it is incomplete."""
        self.is_being_written = True

    def end_call(self, num_columns: int) -> None:
        self.num_columns += num_columns
        self.is_being_written = False

    def check_fits(self, config: CondenseConfig) -> None:
        """Raises `ValueError` where the cache was made for another model."""
        for name, value in self.made_for.items():
            if value != getattr(config, name):
                raise ValueError(
                    f"the cache was made for {name}={value!r} and the model has {getattr(config, name)!r}: pass a "
                    "FoldedCache(model.config)."
                )

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
        for layer in self.layers:
            if layer.is_initialized:
                tensors += [layer.keys, layer.values, layer.next_keys, layer.next_values]
        return tensors

    def read(self, piece: Piece) -> Sequence[FoldedCacheLayer]:
        self.begin_call()
        return self.layers

    def write(self, remembered: Sequence[Memory], piece: Piece) -> None:
        for layer, memory in zip(self.layers, remembered, strict=True):
            layer.remember(memory, piece)

    def note_last(self, hidden_RTD: torch.Tensor, piece: Piece) -> None:
        """Notes the final hidden state of each row's last token so far."""
        if piece.all_rows and piece.rectangular:
            self.last_hidden_BD = hidden_RTD[:, -1].clone()
            return
        device = hidden_RTD.device
        last_R = on_device(torch.tensor(piece.counts) - 1, device)
        last_RD = hidden_RTD[torch.arange(len(last_R), device=device), last_R]
        if self.last_hidden_BD is None:
            self.last_hidden_BD = hidden_RTD.new_zeros(piece.batch_size, hidden_RTD.shape[-1])
        self.last_hidden_BD = self.last_hidden_BD.index_copy(0, on_device(torch.tensor(piece.rows), device), last_RD)

    @property
    def num_bytes(self) -> int:
        """Bytes held by the state of all rows."""
        tensors = self._tensors() + ([] if self.timeline is None else self.timeline.tensors)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    # transformers' interface

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of input seen, padding included."""
        return self.num_columns

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def batch_size(self) -> int:
        return len(self.cursor.filled)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a FoldedCache cannot roll back: copy.deepcopy it before the tokens you may want to undo.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows_B = torch.as_tensor(indices).cpu()
        rows_B = rows_B.nonzero()[:, 0] if rows_B.dtype == torch.bool else rows_B
        self.cursor.select(rows_B.tolist())
        self.fixed_step = None  # it would keep the old rows' buffers alive
        for layer in self.layers:
            layer.select(rows_B)
        if self.timeline is not None:
            self.timeline.select(rows_B)
        if self.last_hidden_BD is not None:
            self.last_hidden_BD = self.last_hidden_BD[rows_B.to(self.last_hidden_BD.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)


def _writable(buffer: torch.Tensor) -> torch.Tensor:
    """In place where nothing is recorded; a copy where autograd may still need the old values."""
    frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
    recorded = torch.is_grad_enabled() or buffer.requires_grad
    return buffer.clone() if recorded or frozen else buffer


def _write(buffer_BGKE: torch.Tensor, values_RGTE: torch.Tensor, piece: Piece, offset: int = 0) -> torch.Tensor:
    """Puts a step's tokens at each row's place in its segment, `offset` keys into the buffer."""
    written = _writable(buffer_BGKE)
    if piece.all_rows and piece.uniform and piece.rectangular:
        first = offset + piece.filled[0]
        written[:, :, first : first + piece.width] = values_RGTE
    else:
        device = buffer_BGKE.device
        row_n, token_n = piece.valid
        position_n = offset + torch.tensor(piece.filled)[row_n] + token_n
        own_row_n = torch.tensor(piece.rows)[row_n]
        own_row_n, position_n, row_n, token_n = (
            on_device(index, device) for index in (own_row_n, position_n, row_n, token_n)
        )
        written[own_row_n, :, position_n] = values_RGTE[row_n, :, token_n]
    return written
