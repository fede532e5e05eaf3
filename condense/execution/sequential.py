"""All layers of a segment, then the next segment.

Axes: R rows, T tokens of a step, D model width.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..layers import Step
from ..memory import Memory, Past
from ..segmentation import Piece


class State(Protocol):
    """What travels from step to step: `TransientMemory` within a pass, `FoldedCache` beyond it."""

    def read(self, piece: Piece) -> Sequence[Past | None]: ...

    def write(self, remembered: Sequence[Memory], piece: Piece) -> None: ...


def run_sequential(
    layers: nn.ModuleList,
    steps: Iterable[Step],
    state: State,
    embed: Callable[[Step], torch.Tensor],
    consume: Callable[[torch.Tensor, Step], Any],
    checkpoint: Callable | None,
) -> list[tuple[Piece, Any]]:
    """Runs the steps in turn; returns each one's piece and what `consume` made of its hidden states [R, T, D].

    With `checkpoint` (as `torch.utils.checkpoint.checkpoint`, non-reentrant) a step keeps the memories
    it was given and nothing else; its activations are recomputed one step at a time.
    """
    kept = []
    for step in steps:
        pasts = state.read(step.piece)
        if checkpoint is None:
            consumed, remembered = _run_step(layers, step, embed, consume, pasts)
        else:
            run = partial(_run_checkpointed, layers, step, embed, consume)
            memories_RGKE = [tensor for past in pasts if isinstance(past, Memory) for tensor in past]
            # The tables tell the checkpoint on which device to keep the state of random numbers, for dropout.
            consumed, remembered = checkpoint(run, step.rotary, *memories_RGKE)
        kept.append((step.piece, consumed))
        if step.remembers:
            state.write(remembered, step.piece)
    return kept


def _run_checkpointed(layers, step: Step, embed, consume, _tables, *memories_RGKE):
    """Memories come one tensor after the other, so that hooks on what is saved see them."""
    pasts = [Memory(*pair) for pair in zip(memories_RGKE[::2], memories_RGKE[1::2], strict=True)]
    return _run_step(layers, step, embed, consume, pasts or [None] * len(layers))


def _run_step(layers, step: Step, embed, consume, pasts):
    hidden_RTD = embed(step)
    remembered = []
    for layer, past in zip(layers, pasts, strict=True):
        hidden_RTD, memory = layer(hidden_RTD, past, step)
        remembered.append(memory)
    return consume(hidden_RTD, step), remembered
