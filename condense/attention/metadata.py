"""The data about a chunk that all layers share.

Axes: R rows of a chunk, N columns of an input, T tokens of a chunk, K keys, E head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..ops.kernels.rotary import RotaryTables
from ..segmentation import Chunk, UnpaddedBatch, on_device
from ..state.memory import Memory, RecurrentState
from ..token_inputs import ChunkInputs, TokenInputs
from .mask import AttentionMask


def rotary_tables(
    rotary_emb: Callable[[torch.Tensor, torch.Tensor], RotaryTables], like: torch.Tensor, position_RT: torch.Tensor
) -> RotaryTables:
    """Returns the tables of `rotary_emb` as `rotate` needs them: the sign of the first half of sin is changed.

    transformers computes x cos + [-x2, x1] sin for x = [x1, x2]. The same value is x cos + [x2, x1] [-sin, sin], and
    [x2, x1] is x rolled by half its length: one operation instead of four.
    """
    cos_RTE, sin_RTE = rotary_emb(like, position_RT)
    first, second = sin_RTE.chunk(2, dim=-1)
    return cos_RTE[:, None], torch.cat([-first, second], dim=-1)[:, None]


@dataclass(frozen=True)
class AttentionMetadata:
    """The data about a chunk that all layers share.

    `rotary` holds the tables at the tokens' positions in [memory ; current segment], `memory_rotary` the tables at
    their positions as the next segment's memory. `writes_memory` is false if no later chunk can see a memory of this
    one. `detach_R` is true for rows whose memory of this chunk passes no gradient. A block may read `token_inputs`.
    `sinks` are the keys and values [1, G, 1, E] of each layer that runs the chunk, for its memory's first row; None
    without a sink. With `is_sink` the chunk is the sink itself, and the memories are the layers' inputs.
    """

    chunk: Chunk
    rotary: RotaryTables
    memory_rotary: RotaryTables
    mask: AttentionMask
    writes_memory: bool
    detach_R: tuple[bool, ...]
    token_inputs: ChunkInputs | None = None
    sinks: Sequence[Memory | None] | None = field(default=None, compare=False, repr=False)
    is_sink: bool = False

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "AttentionMetadata":
        """Moves the metadata to another device, which accelerate requests if a device map puts layers on several."""
        rotary, memory_rotary = (
            (cos.to(device, non_blocking=non_blocking), sin.to(device, non_blocking=non_blocking))
            for cos, sin in (self.rotary, self.memory_rotary)
        )
        log_duration_RK = self.mask.log_duration_RK
        if log_duration_RK is not None:
            log_duration_RK = log_duration_RK.to(device, non_blocking=non_blocking)
        mask = replace(self.mask, log_duration_RK=log_duration_RK)
        inputs = None if self.token_inputs is None else self.token_inputs.to(device, non_blocking)
        return replace(self, rotary=rotary, memory_rotary=memory_rotary, mask=mask, token_inputs=inputs)


class AttentionMetadataBuilder:
    """Makes the metadata of one call's chunks in order. The durations of each chunk are added to the state's timeline.

    `rotary_emb(like, positions)` returns the rotary tables; `like` gives their device and dtype. `bptt_segments` comes
    from the configuration. `has_cache` is true if a later call can see this call's memory. `shares_masks` is true if
    one mask may serve all uniform chunks. `sinks` are those of all layers.
    """

    def __init__(
        self,
        rotary_emb: Callable[[torch.Tensor, torch.Tensor], RotaryTables],
        like: torch.Tensor,
        batch: UnpaddedBatch,
        state: RecurrentState,
        token_inputs: TokenInputs,
        bptt_segments: int | None,
        has_cache: bool,
        shares_masks: bool = True,
        sinks: Sequence[Memory | None] | None = None,
    ):
        self.rotary_emb, self.like, self.batch = rotary_emb, like, batch
        self.segment_length = state.positions.segment_length
        self.timeline, self.token_inputs = state.timeline, token_inputs
        self.bptt_segments, self.has_cache, self.sinks = bptt_segments, has_cache, sinks
        self._tables: dict[int, RotaryTables] = {}  # of whole segments, by their first position
        self._masks: dict[tuple[Any, ...], torch.Tensor] | None = {} if shares_masks else None

    def build(self, chunk: Chunk, is_sink: bool = False) -> AttentionMetadata:
        rotary, memory_rotary, log_duration_RK = self._tables_of(chunk)
        span = self.bptt_segments
        return AttentionMetadata(
            chunk=chunk,
            rotary=rotary,
            memory_rotary=memory_rotary,
            mask=AttentionMask(chunk, log_duration_RK, self._masks),
            writes_memory=self.has_cache or chunk.starts[0] + chunk.width < max(self.batch.lengths),
            detach_R=tuple(span is not None and (segment + 1) % span == 0 for segment in chunk.segments),
            token_inputs=self.token_inputs.of_chunk(chunk),
            sinks=self.sinks,
            is_sink=is_sink,
        )

    def _tables_of(self, chunk: Chunk) -> tuple[RotaryTables, RotaryTables, torch.Tensor | None]:
        """Returns tables after the memory and as the next memory, and log durations [R, K] or None."""
        if self.timeline is None and chunk.uniform:
            first, memory_length = chunk.offsets[0], chunk.memory_lengths[0]
            own = self._consecutive(first, chunk.width)
            return self._consecutive(first + memory_length, chunk.width) if memory_length else own, own, None
        position_RT, local_RT, log_duration_RK = self._positions(chunk)
        return self._rotary(position_RT), self._rotary(local_RT), log_duration_RK

    def _positions(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns positions [R, T] after the memory and as the next memory, and log durations [R, K] or None."""
        durations_BN = self.token_inputs.durations_BN
        if self.timeline is None or durations_BN is None:
            local_RT = torch.tensor(chunk.offsets)[:, None] + torch.arange(chunk.width)
            return local_RT + torch.tensor(chunk.memory_lengths)[:, None], local_RT, None
        position_RT, local_RT = self.timeline.advance(self.batch.gather(durations_BN, chunk), chunk)
        log_duration_RK = self.timeline.log_durations(chunk.rows)
        if chunk.uniform:
            log_duration_RK = log_duration_RK[:, chunk.visible_keys]
        accurate = torch.promote_types(self.like.dtype, torch.float32)
        self.timeline.roll(chunk.completed_rows)
        return position_RT, local_RT, on_device(log_duration_RK.to(accurate), self.like.device)

    def _consecutive(self, first: int, width: int) -> RotaryTables:
        """Returns the tables of all rows at consecutive positions; whole segments share theirs."""
        make = lambda: self._rotary(torch.arange(first, first + width)[None])  # noqa: E731
        if width != self.segment_length:
            return make()
        if first not in self._tables:
            keeps = getattr(self.rotary_emb, "kept_tables", None)
            self._tables[first] = make() if keeps is None else keeps(first, width, self.like, make)
        return self._tables[first]

    def _rotary(self, position_RT: torch.Tensor) -> RotaryTables:
        return rotary_tables(self.rotary_emb, self.like, on_device(position_RT, self.like.device))
