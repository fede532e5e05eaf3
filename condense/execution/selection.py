"""The choice of a schedule: a rule whose constants are fitted to measurements (docs/performance.md).

A wave computes the same result as S segments through M layers one after the other, in S + M - 1 diagonals instead of S
M cells. It is faster while a single cell is too narrow to keep the device busy. It is slower if the diagonals are not
few enough, and on a CPU if a whole diagonal's tensors do not fit into the cache as a cell's tensors do.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig

from ..configuration import CondenseConfig
from ..segmentation import SegmentPositions
from ..state.memory import RecurrentState
from .graph import graph_stack, has_whole_segments
from .stacking import REMEDY, Stack, check_stackable, has_stack, is_stackable

# Measured on two CPU cores: docs/results/schedules.
CPU_SAVED_LAUNCHES = 6
CPU_BAND_BYTES = 16 * 2**20
# Fitted to one text at a time on an H200: docs/results/gpu. When the host limits the speed there, a diagonal takes up
# to twice as long as a cell.
CUDA_CELLS_PER_DIAGONAL = 2
# Not measured above 1,024. Diagonal Batching reports gains of 1.8 at 1,024 and 1.1 at 4,096 tokens on an A100.
CUDA_CELL_TOKENS = 4096
GROUP_TOKENS, GROUP_BYTES = 4096, 8 * 2**30
CAPTURING_DEVICES = ("cuda",)  # where "auto" trains by graphs


class Schedule(NamedTuple):
    """The order of a call's cells, "sequential" or "wavefront", and the layers' stack if groups of segments are
    captured."""

    order: str
    stack: Stack | None = None


def is_sharded(model: nn.Module) -> bool:
    """Returns whether FSDP gathers the weights of all layers for a call of the model."""
    return any(base.__name__ == "FSDPModule" for base in type(model).__mro__)


def schedule_for(
    config: CondenseConfig,
    layers: nn.ModuleList,
    lengths: Sequence[int],
    state: RecurrentState,
    checkpoint_segments: int | None,
    has_durations: bool,
    hidden_dtype: torch.dtype,
    sharded: bool,
) -> Schedule:
    """Returns the schedule of a call with `lengths[b]` further tokens of each row; chooses it for "auto".

    `hidden_dtype` is the dtype of the layers' input. `checkpoint_segments` is the group size of gradient checkpointing,
    None without it. `sharded`: see `is_sharded`.

    A cache that records is read sequentially: a wave does not write the tokens that `crop` goes back to.

    Raises `ValueError` for a wave of layers that can't be stacked, within groups of one segment, or under FSDP on the
    whole model, which gathers the weights without a hook in the layers. Also raises it for segments that a graph can't
    compute.
    """
    requested = config.schedule
    if requested == "wavefront" and sharded:
        raise ValueError(f"FSDP gathers weights for a call of the model, and a wavefront would keep them: {REMEDY}.")
    if requested == "wavefront" and longest_wave(lengths, state.positions)[0]:
        if config.depth is not None:
            raise ValueError(
                f"a depth block cannot be stacked with layers, and a wavefront runs them as one: {REMEDY}."
            )
        if checkpoint_segments == 1:
            raise ValueError(
                "gradient checkpointing recomputes each segment on its own, but schedule='wavefront' runs several at "
                f"once: pass checkpoint_segments=2 or more with use_reentrant=False, or {REMEDY}."
            )
        check_stackable(layers)  # before a part of the call is in a cache
    if state.is_recording:
        return Schedule("sequential")
    if requested in ("sequential", "wavefront"):
        return Schedule(requested)
    stack = None
    if has_whole_segments(lengths, state.positions):
        find = graph_stack if requested == "graph" else _graph_stack_of_auto
        stack = find(config, layers, hidden_dtype, has_durations, sharded)
    if sharded:
        return Schedule("sequential")
    stackable = stack is not None
    order = choose_schedule(config, layers, lengths, state.positions, checkpoint_segments, stackable)
    return Schedule(order, stack)


def _graph_stack_of_auto(
    config: CondenseConfig, layers: nn.ModuleList, hidden_dtype: torch.dtype, has_durations: bool, sharded: bool
) -> Stack | None:
    """Returns the stack if "auto" captures groups: in training, unless they are refused or some layers are frozen.

    Captured groups would store the activations of frozen layers.
    """
    weight = next(layers.parameters(), None)
    if weight is None or weight.device.type not in CAPTURING_DEVICES or not torch.is_grad_enabled():
        return None
    if not has_stack(layers) and not all(parameter.requires_grad for parameter in layers.parameters()):
        return None
    try:
        stack = graph_stack(config, layers, hidden_dtype, has_durations, sharded)
    except ValueError:
        return None
    return stack if stack.is_trained else None


def choose_schedule(
    config: CondenseConfig,
    layers: nn.ModuleList,
    lengths: Sequence[int],
    positions: SegmentPositions,
    checkpoint_segments: int | None = None,
    stackable: bool = False,
) -> str:
    """Returns `"sequential"` or `"wavefront"`, for `lengths[b]` further tokens of each row. Changes nothing.

    Sequential if a wave cannot run (rows at different offsets, hooks or adapters in the layers) or would store too much
    (the activations of frozen layers). Also sequential under autocast, which would cast the stacked weights again for
    every diagonal. Under gradient checkpointing a wave is within a group of segments. `stackable`: the layers are known
    to be stackable.
    """
    num_segments, num_rows = longest_wave(lengths, positions)
    weight = next(layers.parameters(), None)
    if weight is None or _casts_weights(weight.device.type):
        return "sequential"
    device, itemsize = weight.device.type, weight.element_size()
    num_segments = min(num_segments, checkpoint_segments or num_segments)
    if reason_for_sequential(config, num_segments, num_rows, device, itemsize):
        return "sequential"
    # If the model is partly frozen, the sequential order stores the activations of trained layers only.
    trains = torch.is_grad_enabled() and not stackable
    if trains and len({parameter.requires_grad for parameter in layers.parameters()}) > 1:
        return "sequential"
    return "wavefront" if stackable or is_stackable(layers) else "sequential"


def reason_for_sequential(
    config: CondenseConfig, num_segments: int, num_rows: int, device: str, itemsize: int
) -> str | None:
    """Returns why "auto" does not run a wave of whole segments, or None if it does. This part needs no model."""
    num_layers, cell_tokens = config.num_hidden_layers, num_rows * config.segment_length
    cells, diagonals = num_segments * num_layers, num_segments + num_layers - 1
    too_few = f"{num_segments} segments in {num_layers} layers are too few to gain from a wave"
    if device == "cpu":
        if cells - diagonals < CPU_SAVED_LAUNCHES:
            return too_few
        band_bytes = min(num_layers, num_segments) * cell_tokens * config.intermediate_size * itemsize
        return "a diagonal does not fit into the cache" if band_bytes > CPU_BAND_BYTES else None
    if cells < CUDA_CELLS_PER_DIAGONAL * diagonals:
        return too_few
    if cell_tokens > CUDA_CELL_TOKENS:
        return (
            f"{num_rows} rows x {config.segment_length} tokens of a segment are more than {CUDA_CELL_TOKENS:,} tokens, "
            "which fill a GPU without a wave"
        )
    return None


def default_checkpoint_segments(config: LlamaConfig, cell_tokens: int, itemsize: int) -> int:
    """Returns the number of segments in a captured group of gradient checkpointing: enough for `GROUP_TOKENS`, unless
    their activations exceed `GROUP_BYTES`. `cell_tokens` is the number of tokens of a segment in all rows."""
    keys = config.num_key_value_heads * config.head_dim
    width = 5 * config.hidden_size + 2 * config.num_attention_heads * config.head_dim
    token_bytes = itemsize * config.num_hidden_layers * (width + 6 * keys + 3 * config.intermediate_size)
    segments = min(GROUP_TOKENS // cell_tokens, GROUP_BYTES // (cell_tokens * token_bytes))
    return 2 ** (max(segments, 1).bit_length() - 1)


def faster_as_wave(config: CondenseConfig, num_segments: int, num_rows: int, device: str, itemsize: int) -> bool:
    """Returns whether a wave is faster for this number of whole segments and rows."""
    return reason_for_sequential(config, num_segments, num_rows, device, itemsize) is None


def _casts_weights(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def longest_wave(lengths: Sequence[int], positions: SegmentPositions) -> tuple[int, int]:
    """Returns segments and rows of the longest wave: rows run together until the first of them ends."""
    if len(set(positions.offsets)) > 1 or len({segment > 0 for segment in positions.segments}) > 1:
        return 0, 0
    opening = -positions.offsets[0] % positions.segment_length  # the rest of a segment that has begun
    ends = sorted(max(length - opening, 0) // positions.segment_length for length in lengths)
    waves = [(end - begin, len(ends) - row) for row, (begin, end) in enumerate(pairwise([0, *ends]))]
    return max(waves)
