"""Which schedule is faster: a rule with its constants fitted to measurements (docs/performance.md).

A wave spends (S - 1)(N - 1) launches less than S segments through N layers one after the other, and
computes the same. It wins while a single cell is too narrow to keep the device busy, and loses where
the wide tensors of a whole diagonal no longer fit where those of one cell did.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from ..configuration import CondenseConfig
from ..segmentation import Cursor
from .stacking import REMEDY, stack_of

# Measured on two CPU cores: docs/results/schedules.
CPU_SAVED_LAUNCHES = 6
CPU_BAND_BYTES = 16 * 2**20
# Not measured here. Diagonal Batching reports gains of 1.8 at 1,024 and 1.1 at 4,096 tokens on an A100.
CUDA_SAVED_LAUNCHES = 6
CUDA_CELL_TOKENS = 4096


def schedule_for(model: PreTrainedModel, lengths: Sequence[int], cursor: Cursor, checkpointing: bool) -> str:
    """What the model's config names, or for "auto" what `choose_schedule` takes.

    Raises `ValueError` for a wave under FSDP on the whole model: its weights are gathered without a hook in the layers.
    """
    asked, sharded = model.config.schedule, any(base.__name__ == "FSDPModule" for base in type(model).__mro__)
    if asked == "wavefront" and sharded:
        raise ValueError(f"FSDP gathers weights for a call of the model, and a wavefront would keep them: {REMEDY}.")
    if asked == "wavefront" and longest_wave(lengths, cursor)[0]:
        stack_of(model.model.layers)  # refused, where it is, before a part of the call is in a cache
    if asked != "auto":
        return asked
    return choose_schedule(model.config, model.model.layers, lengths, cursor, checkpointing or sharded)


def choose_schedule(
    config: CondenseConfig, layers: nn.ModuleList, lengths: Sequence[int], cursor: Cursor, checkpointing: bool
) -> str:
    """`"sequential"` or `"wavefront"`, for `lengths[b]` further tokens of each row.

    Sequential wherever a wave can't run (rows at different places, hooks or adapters in the layers) or would keep
    more than it is worth: under gradient checkpointing every layer's hidden states, of a partly frozen model the
    activations of frozen layers. And under autocast, which casts a stack of weights anew for every diagonal.
    """
    num_segments, num_rows = longest_wave(lengths, cursor)
    weight = next(layers.parameters(), None)
    if weight is None or checkpointing or _casts_weights(weight.device.type):
        return "sequential"
    if not faster_as_wave(config, num_segments, num_rows, weight.device.type, weight.element_size()):
        return "sequential"
    # Of a partly frozen model the sequential order keeps activations for what is trained alone.
    if torch.is_grad_enabled() and len({parameter.requires_grad for parameter in layers.parameters()}) > 1:
        return "sequential"
    try:
        stack_of(layers)
    except ValueError:
        return "sequential"
    return "wavefront"


def faster_as_wave(config: CondenseConfig, num_segments: int, num_rows: int, device: str, itemsize: int) -> bool:
    """The rule alone: whether that many whole segments of that many rows are read faster as a wave."""
    num_layers, cell_tokens = config.num_hidden_layers, num_rows * config.segment_length
    saved_launches = (num_segments - 1) * (num_layers - 1)
    if device == "cpu":
        band_bytes = min(num_layers, num_segments) * cell_tokens * config.intermediate_size * itemsize
        return saved_launches >= CPU_SAVED_LAUNCHES and band_bytes <= CPU_BAND_BYTES
    return saved_launches >= CUDA_SAVED_LAUNCHES and cell_tokens <= CUDA_CELL_TOKENS


def _casts_weights(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def longest_wave(lengths: Sequence[int], cursor: Cursor) -> tuple[int, int]:
    """Whole segments and rows of the longest wave: rows go together until the first of them ends."""
    if len(set(cursor.filled)) > 1 or len({count > 0 for count in cursor.segments}) > 1:
        return 0, 0
    opening = -cursor.filled[0] % cursor.segment_length  # what is left of a segment that has begun
    ends = sorted(max(length - opening, 0) // cursor.segment_length for length in lengths)
    waves = [(end - begin, len(ends) - row) for row, (begin, end) in enumerate(pairwise([0, *ends]))]
    return max(waves)
