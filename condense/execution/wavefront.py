"""All cells of a diagonal at once, then the next diagonal.

Cell (layer n, segment s) needs cells (n - 1, s) and (n, s - 1) only, so those of equal n + s are
independent: S segments through N layers take S + N - 1 wide steps instead of S * N narrow ones.

    segment   0  1  2  3        the diagonal of step 3: layer 0 on segment 3, layer 1 on segment 2,
    layer 0   0  1  2  3        layer 2 on segment 1; the next one takes their outputs one layer up,
    layer 1   1  2  3  4        and the memories that they leave where they are.
    layer 2   2  3  4  5

Axes: R rows, n layers of a band, T tokens of a step, D model width, G key/value heads, K keys, E head width.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..attention import Visibility
from ..layers import Step
from ..memory import Memory
from ..segmentation import Piece
from .sequential import State, run_sequential
from .stacking import Stack, stack_of


def run_wavefront(
    layers: nn.ModuleList,
    steps: Iterable[Step],
    state: State,
    embed: Callable[[Step], torch.Tensor],
    consume: Callable[[torch.Tensor, Step], Any],
    checkpoint: Callable | None,
) -> list[tuple[Piece, Any]]:
    """As `run_sequential`. Whole segments of the same rows go in waves; what stands between them goes alone.

    With `checkpoint` a diagonal keeps the memories and the hidden states it was given: more than a
    sequential step does, by the hidden states of every layer.
    """
    kept: list[tuple[Piece, Any]] = []
    for rows, run in groupby(steps, lambda step: whole_rows(step.piece)):
        if rows is None:
            kept += run_sequential(layers, run, state, embed, consume, checkpoint)
        else:
            kept += _wave(stack_of(layers), run, state, embed, consume, checkpoint)
    return kept


def whole_rows(piece: Piece) -> tuple[int, ...] | None:
    """The rows of a piece that is one whole segment of each; None where it isn't."""
    whole = piece.uniform and piece.rectangular and piece.width == piece.segment_length
    return tuple(piece.rows) if whole else None


@dataclass(frozen=True)
class BandStep(Step):
    """What the layers of a band share, a segment each; all but perhaps the last of them have a memory."""

    first_visibility: Visibility | None  # of the rows that have none

    def views(self, past):
        num_rows = 0 if past is None else len(past.key_RGKE)
        if past is not None:
            yield slice(num_rows), self.visibility, past
        if self.first_visibility is not None:
            yield slice(num_rows, None), self.first_visibility, None


def _wave(stack: Stack, run: Iterator[Step], state: State, embed, consume, checkpoint) -> list[tuple[Piece, Any]]:
    """A diagonal at a time: lets a segment in at layer 0, and one out at the top; all in flight go a layer up."""
    num_layers = len(stack.layers)
    kept: list[tuple[Piece, Any]] = []
    flight: deque[Step] = deque()  # newest first, so in the order of the layers, of which the first is `low`
    low = num_rows = 0
    hidden: torch.Tensor | None = None  # what the segments in flight bring to their next layers
    memory: Memory | None = None  # what the last diagonal's layers remember
    before: Sequence[Memory | None] = ()  # what layers remember from before the wave
    after: list[Memory] = []  # and at its end
    while True:
        entering = next(run, None)
        if entering is not None:
            if not kept and not flight:
                before = [past and past.memory(entering.piece) for past in state.read(entering.piece)]
            flight.appendleft(entering)
        else:  # the last segment has left the lowest layer
            if memory is not None:
                after.append(memory.rows(0, num_rows))
                memory = memory.rows(num_rows, None) if len(memory.key_RGKE) > num_rows else None
            low += 1
            if not flight:
                break
        num_rows = len(flight[0].piece.rows)
        high = low + len(flight) - 1
        if not kept and (older := before[high]) is not None:  # the wave's first segment, on its way up
            memory = older if memory is None else memory.followed_by(older)
        num_remembering = 0 if memory is None else len(memory.key_RGKE)
        step = _together(flight, num_remembering // num_rows)
        leaving = flight.pop() if high == num_layers - 1 else None
        diagonal = partial(_run_diagonal, stack.band(low, high + 1), step, entering, leaving, embed, consume)
        # The tables tell the checkpoint on which device to keep the state of random numbers, for dropout.
        arguments = step.rotary, hidden, *(memory or (None, None))
        hidden, consumed, memory = diagonal(*arguments) if checkpoint is None else checkpoint(diagonal, *arguments)
        if leaving is not None:
            kept.append((leaving.piece, consumed))
            last = leaving
    if last.remembers:
        state.write(after, last.piece)
    return kept


def _run_diagonal(band, step, entering: Step | None, leaving: Step | None, embed, consume, _tables, hidden, key, value):
    memory = None if key is None else Memory(key, value)
    if entering is not None:
        new_RTD = embed(entering)
        hidden = new_RTD if hidden is None else torch.cat([new_RTD, hidden])
    hidden_RTD, remembered = band(hidden, memory, step)
    if leaving is None:
        return hidden_RTD, None, remembered
    staying, num_rows = len(hidden_RTD) - len(leaving.piece.rows), len(leaving.piece.rows)
    staying_RTD, leaving_RTD = hidden_RTD.split([staying, num_rows])
    return staying_RTD, consume(leaving_RTD, leaving), remembered


def _together(flight: Sequence[Step], num_remembering: int) -> BandStep:
    """The steps as one, whose rows are [step, row]; the first `num_remembering` have a memory."""
    alone = list(flight)[num_remembering:]
    assert len(alone) <= 1, "only a text's first segment has no memory"
    visibilities = [_see_together(steps) for steps in (list(flight)[:num_remembering], alone) if steps]
    return BandStep(
        piece=flight[0].piece,
        rotary=_tables_together([step.rotary for step in flight], len(flight[0].piece.rows)),
        memory_rotary=_tables_together([step.memory_rotary for step in flight], len(flight[0].piece.rows)),
        visibility=visibilities[0],
        remembers=any(step.remembers for step in flight),
        cut_R=tuple(cut for step in flight for cut in step.cut_R),
        first_visibility=visibilities[-1] if alone else None,
    )


def _see_together(steps: Sequence[Step]) -> Visibility:
    log_durations = [step.visibility.log_duration_RK for step in steps]
    known = [log_duration_RK for log_duration_RK in log_durations if log_duration_RK is not None]
    assert len(known) in (0, len(steps))
    return Visibility(steps[0].piece, torch.cat(known) if known else None)


def _tables_together(tables: Sequence[tuple[torch.Tensor, torch.Tensor]], num_rows: int):
    first = tables[0]
    if len(first[0]) == 1 and all(table is first for table in tables):  # as for most diagonals
        return first
    return tuple(torch.cat([part.expand(num_rows, -1, -1) for part in parts]) for parts in zip(*tables, strict=True))
