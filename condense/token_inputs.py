"""A call's inputs for each token besides its id: durations and a depth block's control. Also counts the evaluations of
the block's vector field.

Axes: B rows of a batch, N columns of an input, R rows of a chunk, T tokens of a chunk, C components of the control.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .configuration import CondenseConfig
from .control import check_control, control_of_chunk, zero_control
from .durations import Timeline, check_durations
from .segmentation import Chunk, UnpaddedBatch, on_device
from .state.memory import RecurrentState


def check_token_inputs(config: CondenseConfig, given: Mapping[str, Any], shape: tuple[int, int]) -> None:
    """Raises `ValueError` for durations or a control that do not fit an input of shape [B, N]."""
    if (durations_BN := given.get("durations")) is not None:
        check_durations(durations_BN, shape)
    if (control := given.get("control")) is not None:
        check_control(config.control_size, control, shape)


class TokenInputs:
    """`durations_BN` holds the given durations or, after `start`, the durations of all tokens on the host. `control` is
    [B, C] or [B, N, C]. Both are None if not given."""

    def __init__(
        self,
        batch: UnpaddedBatch,
        device: torch.device,
        durations_BN: torch.Tensor | None = None,
        control: torch.Tensor | None = None,
    ):
        self.batch, self.durations_BN, self.control = batch, durations_BN, control
        self.evaluations = EvaluationCounts(batch, device)

    @classmethod
    def from_arguments(
        cls, config: CondenseConfig, given: Mapping[str, Any], inputs: torch.Tensor, batch: UnpaddedBatch, like: Any
    ) -> "TokenInputs":
        """Returns the inputs `given` to `forward`; a missing control is 0."""
        control = given["control"]
        if control is None and config.control_size:
            control = zero_control(config.control_size, inputs, like)
        return cls(batch, inputs.device, given["durations"], control)

    def start(self, state: RecurrentState, config: CondenseConfig, like: torch.Tensor) -> Timeline | None:
        """Returns the timeline that the call advances, None without durations. Checks all chunks and changes no state,
        because a refused call must not change anything. `like` gives device and dtype of the control."""
        self.control = None if self.control is None else self.control.to(like)
        timeline = state.timeline
        if self.durations_BN is not None and timeline is None:
            timeline = Timeline(state.positions, config.position_anchor, config.sink_token_id is not None)
        if timeline is not None:
            self.durations_BN = timeline.known_durations(self.durations_BN, self.batch)
            timeline.check(self.durations_BN, self.batch, state.positions)
        return timeline

    def of_chunk(self, chunk: Chunk) -> "ChunkInputs":
        control_RTC = None if self.control is None else control_of_chunk(self.control, self.batch, chunk)
        return ChunkInputs(chunk, control_RTC, self.evaluations)


@dataclass(frozen=True)
class ChunkInputs:
    """`control_RTC` is the control of each token, or with T = 1 of each row."""

    chunk: Chunk
    control_RTC: torch.Tensor | None
    evaluations: "EvaluationCounts" = field(compare=False)

    def count_evaluations(self, num_evaluations: int | torch.Tensor) -> None:
        """Adds a block's evaluations of its vector field, for each token [R, T], or one number for all."""
        self.evaluations.set(self.chunk, num_evaluations)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ChunkInputs":
        if self.control_RTC is None:
            return self
        return replace(self, control_RTC=self.control_RTC.to(device, non_blocking=non_blocking))


class EvaluationCounts:
    """Counts evaluations by chunk. A chunk that gradient checkpointing runs twice counts once."""

    def __init__(self, batch: UnpaddedBatch, device: torch.device):
        self.batch, self.device = batch, device
        self.counts: dict[tuple[int, ...], tuple[Chunk, int | torch.Tensor]] = {}

    def set(self, chunk: Chunk, num_evaluations: int | torch.Tensor) -> None:
        """Sets the evaluations of a chunk: [R, T], or one number for all of its tokens."""
        self.counts[(*chunk.rows, *chunk.starts)] = chunk, num_evaluations

    def collect(self) -> torch.Tensor | None:
        """Returns [B, N] on the device of the input, 0 at padding; None if there was no vector field."""
        if not self.counts:
            return None
        shape, device = (self.batch.batch_size, self.batch.num_columns), self.device
        collected_BN = torch.zeros(shape, dtype=torch.long, device=device)
        for chunk, counts in self.counts.values():
            row_n, token_n = chunk.token_indices
            own_row_n = torch.tensor(chunk.rows)[row_n]
            column_n = torch.tensor(chunk.starts)[row_n] + token_n
            if self.batch.mask_BN is not None:
                column_n = self.batch.columns_BN[own_row_n, column_n]
            if isinstance(counts, torch.Tensor):
                counts = counts.to(device)[on_device(row_n, device), on_device(token_n, device)]
            collected_BN[on_device(own_row_n, device), on_device(column_n, device)] = counts
        return collected_BN
