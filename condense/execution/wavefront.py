"""All cells of a diagonal at once, then the next diagonal.

Cell (layer m, segment s) needs cells (m - 1, s) and (m, s - 1) only, so cells of equal m + s are independent:
S segments through M layers take S + M - 1 wide steps instead of S * M narrow ones.

    segment   0  1  2  3        the diagonal of step 3: layer 0 on segment 3, layer 1 on segment 2,
    layer 0   0  1  2  3        layer 2 on segment 1; the next diagonal takes their outputs one layer up,
    layer 1   1  2  3  4        and their memories at the same layers.
    layer 2   2  3  4  5

The layers of a diagonal are consecutive and run as one: a band.

Axes: R rows of a chunk or of a band (layer after layer), T tokens of a chunk, D hidden size, K keys.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from ..attention import AttentionMask, AttentionMetadata
from ..attention.metadata import RotaryTables
from ..state.memory import Memory, RecurrentState
from .band import Band, BandMetadata, run_band
from .executor import ChunkOutput, Embed
from .group_buffers import GroupBuffers
from .sequential import SequentialExecutor
from .stacked_parameters import sums_by_name
from .stacking import Stack, stack_of


class WavefrontExecutor:
    """Consecutive whole segments of the same rows form a wave; all other chunks run sequentially between waves.

    In a captured group, gradients of weights are added to `buffers`. Raises `ValueError` for layers that cannot be
    stacked, when the first wave begins.
    """

    def __init__(self, layers: nn.ModuleList, state: RecurrentState, embed: Embed, buffers: GroupBuffers | None = None):
        self.layers, self.state, self.buffers = layers, state, buffers
        self.sequential = SequentialExecutor(list(layers), state, embed)
        self.wave: _Wave | None = None

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        chunk, outputs = metadata.chunk, []
        if self.wave is not None and not (chunk.whole_segments and chunk.rows == self.wave.rows):
            outputs = self.finish()
        if not chunk.whole_segments:
            return outputs + self.sequential.submit(metadata)
        if self.wave is None:
            self.wave = _Wave(stack_of(self.layers), self.sequential, metadata, self.buffers)
        return outputs + self.wave.advance(metadata)

    def finish(self) -> list[ChunkOutput]:
        wave, self.wave = self.wave, None
        return [] if wave is None else wave.drain()


class _Wave:
    """Segments in flight, the newest first: they are at consecutive layers, beginning with layer `low`.

    `hidden_RTD` is the input of their next layers, `memory` the memory of these layers. `earlier` holds the memories
    from before the wave, `later` the memories at its end, layer by layer.
    """

    def __init__(
        self, stack: Stack, sequential: SequentialExecutor, first: AttentionMetadata, buffers: GroupBuffers | None
    ):
        self.stack, self.state, self.rows = stack, sequential.state, first.chunk.rows
        self.buffers = buffers
        self.sums = sums_by_name(stack.parameters) if buffers is None else buffers.begun
        self.embed = sequential.embed
        key_values = self.state.key_values(first.chunk)
        self.earlier = [None if item is None else item.memory(first.chunk) for item in key_values]
        self.later: list[Memory] = []
        self.in_flight: deque[AttentionMetadata] = deque()
        self.newest = first
        self.low, self.first_is_in_flight = 0, True
        self.hidden_RTD: torch.Tensor | None = None
        self.memory: Memory | None = None

    def advance(self, entering: AttentionMetadata) -> list[ChunkOutput]:
        """Lets a segment in at layer 0, and moves every segment one layer up."""
        self.in_flight.appendleft(entering)
        self.newest = entering
        return self._run_diagonal(entering)

    def drain(self) -> list[ChunkOutput]:
        """Moves the segments in flight up until the last one has left, and writes the memories."""
        outputs: list[ChunkOutput] = []
        num_rows = len(self.rows)
        while True:
            if self.memory is not None:  # the newest segment has left the lowest layer: its memory there is final
                self.later.append(self.memory.rows(0, num_rows))
                self.memory = self.memory.rows(num_rows, None) if len(self.memory.key_RGKE) > num_rows else None
            self.low += 1
            if not self.in_flight:
                break
            outputs += self._run_diagonal(None)
        if self.newest.writes_memory:
            self.state.write_memory(self.later, self.newest.chunk)
        return outputs

    def _run_diagonal(self, entering: AttentionMetadata | None) -> list[ChunkOutput]:
        high = self.low + len(self.in_flight) - 1
        if self.first_is_in_flight and (earlier := self.earlier[high]) is not None:
            self.memory = earlier if self.memory is None else self.memory.append(earlier)
        num_rows = len(self.rows)
        num_with_memory = 0 if self.memory is None else len(self.memory.key_RGKE) // num_rows
        metadata = band_metadata(self.in_flight, num_with_memory, self.low)
        leaving = self.in_flight.pop() if high == len(self.stack.layers) - 1 else None
        hidden_RTD = self.hidden_RTD
        if entering is not None:
            new_RTD = self.embed(entering.chunk)
            hidden_RTD = new_RTD if hidden_RTD is None else torch.cat([new_RTD, hidden_RTD])
        assert hidden_RTD is not None
        layers, newest = slice(self.low, high + 1), metadata.chunk.segments[0]
        band = Band(self.stack, layers, newest, self.sums, self.buffers)
        hidden_RTD, self.memory = run_band(band, hidden_RTD, self.memory, metadata)
        if leaving is None:
            self.hidden_RTD = hidden_RTD
            return []
        self.hidden_RTD, leaving_RTD = None, hidden_RTD
        if self.in_flight:
            self.hidden_RTD, leaving_RTD = hidden_RTD.split([len(hidden_RTD) - num_rows, num_rows])
        self.first_is_in_flight = False
        return [(leaving.chunk, leaving_RTD)]


def band_metadata(in_flight: Sequence[AttentionMetadata], num_with_memory: int, low: int) -> BandMetadata:
    """Returns the segments' metadata as one, with rows [segment, row]; the first `num_with_memory` have a memory. The
    first segment is at layer `low`."""
    segments = list(in_flight)
    groups = [group for group in (segments[:num_with_memory], segments[num_with_memory:]) if group]
    assert len(segments) - num_with_memory <= 1, "only the first segment of a text has no memory"
    num_rows = len(segments[0].chunk.rows)
    return BandMetadata(
        chunk=segments[0].chunk,
        rotary=_joint_tables([segment.rotary for segment in segments], num_rows),
        memory_rotary=_joint_tables([segment.memory_rotary for segment in segments], num_rows),
        masks=[_joint_mask(group) for group in groups],
        writes_memory=any(segment.writes_memory for segment in segments),
        detach_R=tuple(detach for segment in segments for detach in segment.detach_R),
        sink=_joint_sink(segments[0].sinks, slice(low, low + len(segments)), num_rows),
    )


def _joint_sink(sinks: Sequence[Memory | None] | None, layers: slice, num_rows: int) -> Memory | None:
    """Returns the sinks of some layers as one, [layer, row]."""
    if sinks is None:
        return None
    members = [sink for sink in sinks[layers] if sink is not None]
    return Memory(*(torch.cat(parts).repeat_interleave(num_rows, 0) for parts in zip(*members, strict=True)))


def _joint_mask(segments: Sequence[AttentionMetadata]) -> AttentionMask:
    log_durations = [segment.mask.log_duration_RK for segment in segments]
    known = [log_duration_RK for log_duration_RK in log_durations if log_duration_RK is not None]
    assert len(known) in (0, len(segments))
    first = segments[0].mask
    return AttentionMask(first.chunk, torch.cat(known) if known else None, first.shared)


def _joint_tables(tables: Sequence[RotaryTables], num_rows: int) -> RotaryTables:
    first = tables[0]
    if len(first[0]) == 1 and all(table is first for table in tables):  # as for most diagonals
        return first
    cos, sin = (torch.cat([part.expand(num_rows, -1, -1, -1) for part in parts]) for parts in zip(*tables, strict=True))
    return cos, sin
