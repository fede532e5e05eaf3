"""Durations: the length of each token in time.

A token of duration d_k has weight d_k in attention,

    y = sum_k softmax_k(q.k_k / sqrt(E) + log d_k) v_k,

and positions are cumulative durations, so they are fractional. With `position_anchor="end"` the position of a token is
the end of its interval, with `"start"` the beginning. Durations of one unit give the ordinary Transformer.

Axes: B rows of a batch, R rows of a chunk, N columns of an input, T tokens of a chunk, L segment length, n tokens of a
chunk without padding.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch

from .segmentation import Chunk, SegmentPositions, UnpaddedBatch

# Units of time in two segments. Rotary tables are computed in float32, which is exact up to this integer.
LONGEST_PAIR = 2**24


def durations_from_time_steps(time_steps_BN: torch.Tensor, integration_start: float) -> torch.Tensor:
    """Returns the durations [B, N] of tokens observed at the times `time_steps_BN`.

    d_1 = t_1 - integration_start and d_k = t_k - t_{k-1}. Raises `ValueError` unless times increase strictly.
    """
    start_B1 = torch.full_like(time_steps_BN[:, :1], integration_start)
    durations_BN = torch.diff(time_steps_BN, dim=1, prepend=start_B1)
    stalled = (~(durations_BN > 0)).nonzero()
    if len(stalled):
        row, token = stalled[0].tolist()
        before = integration_start if token == 0 else time_steps_BN[row, token - 1].item()
        raise ValueError(
            f"time step {token} of row {row} is {time_steps_BN[row, token].item()} after {before}: time steps must "
            "increase strictly, the first of them from integration_start."
        )
    return durations_BN


def check_durations(durations_BN: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raises `ValueError` unless durations are finite, not negative and have the input's shape."""
    if tuple(durations_BN.shape) != tuple(shape):
        raise ValueError(
            f"durations of shape {tuple(durations_BN.shape)} do not fit an input of shape {tuple(shape)}: pass one per "
            "token."
        )
    if durations_BN.requires_grad:
        raise ValueError("durations require gradients, which would miss the positions: pass durations.detach().")
    wrong = (~(torch.isfinite(durations_BN) & (durations_BN >= 0))).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the duration of token {token} in row {row} is {durations_BN[row, token].item()}: pass finite values >= 0."
        )


# The duration of each generated token, or a function from the generation step, counted from 0, to one duration for all
# texts or one for each text, [B].
NewTokenDuration = float | Callable[[int], Any]


def durations_for_generation(
    arguments: Mapping[str, Any], num_texts: int, rows_per_text: int, is_assistant: bool = False
) -> dict[str, Any]:
    """Returns the arguments `durations` [B * rows_per_text, N], on the host, and `new_token_duration`, a function from
    the generation step to the durations [B] of its tokens. Returns no arguments if `generate` got neither.

    `generate` has prepared the `arguments`: beams are rows already. Only the prompt of an assistant may be longer than
    its durations, because it includes generated tokens. Raises `ValueError` for durations that do not fit the prompt,
    and for wrong durations of the first step.
    """
    durations, new = arguments.get("durations"), arguments.get("new_token_duration")
    if durations is None and new is None:
        return {}
    columns = arguments["attention_mask"] if arguments.get("attention_mask") is not None else arguments["position_ids"]
    num_columns = columns.shape[1]
    if durations is None:
        durations = torch.ones(num_texts * rows_per_text, num_columns)
    if not durations.is_floating_point():  # those of new tokens may have fractions
        durations = durations.float()
    if is_assistant:
        num_columns = min(num_columns, durations.shape[-1])
    # In the caller's terms: one row per text, without beams.
    check_durations(durations[::rows_per_text], (num_texts, num_columns))
    durations_of_step = partial(_durations_of_step, 1.0 if new is None else new, num_texts, durations.dtype)
    durations_of_step(0)
    return {"durations": durations.cpu(), "new_token_duration": durations_of_step}


def _durations_of_step(new: NewTokenDuration, num_texts: int, dtype: torch.dtype, step: int) -> torch.Tensor:
    """Returns durations [B]; raises `ValueError` unless they are finite, not negative, and one for all or for each."""
    found = new(step) if callable(new) else new
    durations_B = torch.full((), torch.nan)
    if isinstance(found, Real | torch.Tensor):  # a list may be meant for steps
        durations_B = torch.as_tensor(found, dtype=dtype, device="cpu")
    if durations_B.dim() == 0:
        durations_B = durations_B.expand(num_texts)
    if durations_B.shape != (num_texts,) or not bool((torch.isfinite(durations_B) & (durations_B >= 0)).all()):
        raise ValueError(
            f"new_token_duration gives {found!r} at step {step}: pass one number for all texts, or a tensor with one "
            f"for each of {num_texts}, finite and not negative."
        )
    return durations_B


def durations_of_columns(
    durations_RP: torch.Tensor, new_token_duration: Callable[[int], torch.Tensor], seen: int, num_columns: int
) -> torch.Tensor:
    """Returns the durations [R, num_columns] of the columns after `seen`: P of the prompt, then new tokens.

    `new_token_duration` gives one duration per text; all texts have the same number of rows.
    """
    num_rows, num_prompt = durations_RP.shape
    end = seen + num_columns
    parts = [durations_RP[:, seen:end]]
    for step in range(max(seen - num_prompt, 0), end - num_prompt):
        durations_B = new_token_duration(step)
        parts.append(durations_B.repeat_interleave(num_rows // len(durations_B))[:, None])
    return torch.cat(parts, dim=1)


class Timeline:
    """The durations of each row's memory and current segment, and the positions that follow from them.

    They are float64 tensors on the host: they are small, positions stay exact, and no check waits for a device.
    Positions are local to the pair (memory, current segment), because rotary attention depends only on differences.
    """

    def __init__(self, positions: SegmentPositions, anchor: str, has_sink: bool = False):
        self.anchor, self.has_sink = anchor, has_sink
        # Tokens that were read earlier without durations have a duration of one unit.
        self.durations_BL = torch.ones(len(positions.offsets), positions.segment_length, dtype=torch.float64)
        self.memory_BL = torch.ones_like(self.durations_BL)
        self.elapsed_B = torch.tensor(positions.offsets, dtype=torch.float64)
        self.memory_total_B = positions.segment_length * (torch.tensor(positions.segments) > 0).double()
        self.before_roll: Timeline | None = None  # the state before the last roll; tensors are never written in place

    @staticmethod
    def known_durations(durations_BN: torch.Tensor | None, batch: UnpaddedBatch) -> torch.Tensor:
        """Returns durations [B, N] on the host: one unit at padding, and everywhere if none are given."""
        if durations_BN is None:
            return torch.ones(batch.batch_size, batch.num_columns)
        durations_BN = durations_BN.cpu()
        return durations_BN if batch.mask_BN is None else durations_BN.where(batch.mask_BN, 1.0)

    def advance(self, durations_RT: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the tokens of a chunk.

        Returns the positions [R, T] of the tokens in the current segment (after the memory), and their positions as
        the memory of the next segment. Raises `ValueError` for a token that sees no token of positive duration.
        """
        rows_R = torch.tensor(chunk.rows)
        real_RT = torch.arange(chunk.width) < torch.tensor(chunk.counts)[:, None]
        duration_RT = durations_RT.to("cpu", torch.float64).where(real_RT, 0.0)
        # A single sum from the segment's beginning: positions do not depend on how the text is cut into chunks.
        passed_RT = torch.cat([self.elapsed_B[rows_R, None], duration_RT], dim=1).cumsum(1)[:, 1:]
        seen_RT = passed_RT + self.memory_total_B[rows_R, None]
        sees_sink_R1 = torch.tensor([[self.has_sink and segment > 0] for segment in chunk.segments])
        blind = ((seen_RT <= 0) & ~sees_sink_R1).nonzero()
        if len(blind):
            row, token = blind[0].tolist()
            raise ValueError(
                f"in row {chunk.rows[row]}, token {chunk.offsets[row] + token} of segment {chunk.segments[row] + 1} "
                "and all tokens that it sees have duration 0, so attention has no weights. Give a positive duration to "
                "a token of the last segment, or to one of this segment up to here."
            )
        # Shifted by one unit at anchor "end": unit durations then count 0, 1, 2 ... as in the stock Llama.
        local_RT = passed_RT - (1.0 if self.anchor == "end" else duration_RT)
        position_RT = local_RT + self.memory_total_B[rows_R, None]
        far = ((position_RT > LONGEST_PAIR) & real_RT).nonzero()
        if len(far):
            row, token = far[0].tolist()
            raise ValueError(
                f"in row {chunk.rows[row]}, durations add up to {position_RT[row, token].item():g} within two "
                f"segments at token {chunk.offsets[row] + token} of segment {chunk.segments[row] + 1}; above "
                f"{LONGEST_PAIR:,} float32 positions do not distinguish tokens. Scale all durations down."
            )

        row_n, token_n = chunk.token_indices
        position_n = torch.tensor(chunk.offsets)[row_n] + token_n
        self.durations_BL = self.durations_BL.index_put((rows_R[row_n], position_n), duration_RT[row_n, token_n])
        last_R = torch.tensor(chunk.counts)[:, None] - 1
        self.elapsed_B = self.elapsed_B.index_put((rows_R,), passed_RT.gather(1, last_R)[:, 0])
        return position_RT, local_RT

    def check(self, durations_BN: torch.Tensor, batch: UnpaddedBatch, positions: SegmentPositions) -> None:
        """Raises the errors that `advance` would raise for a whole input; changes nothing."""
        timeline, positions = copy.deepcopy((self, positions))
        for chunk in positions.chunks(batch.lengths):
            timeline.advance(batch.gather(durations_BN, chunk), chunk)
            timeline.roll(chunk.completed_rows)

    def log_durations(self, rows: list[int]) -> torch.Tensor:
        """Returns the logarithms [R, 2L] of the durations of [memory ; current segment]; a sink has one unit."""
        logarithms_RK = torch.cat([self.memory_BL[rows], self.durations_BL[rows]], dim=1).log()
        if self.has_sink:
            logarithms_RK[:, 0] = 0.0
        return logarithms_RK

    def roll(self, rows: list[int]) -> None:
        """Makes the current segment of `rows`, which is complete, their memory."""
        if rows:
            self.before_roll = None  # no chain of copies
            self.before_roll = copy.copy(self)
        rows_R = torch.tensor(rows, dtype=torch.long)
        self.memory_BL = self.memory_BL.index_put((rows_R,), self.durations_BL[rows_R])
        self.memory_total_B = self.memory_total_B.index_put((rows_R,), self.elapsed_B[rows_R])
        self.elapsed_B = self.elapsed_B.index_put((rows_R,), torch.zeros(len(rows), dtype=torch.float64))

    def crop(self, offsets: list[int]) -> None:
        """Removes the tokens of the current segment from `offsets` on."""
        kept_BL = torch.arange(self.durations_BL.shape[1]) < torch.tensor(offsets)[:, None]
        self.elapsed_B = self.durations_BL.where(kept_BL, 0.0).cumsum(1)[:, -1]

    def select(self, rows_B: torch.Tensor) -> None:
        """Keeps and repeats rows, as beam search does."""
        for name in ("durations_BL", "memory_BL", "elapsed_B", "memory_total_B"):
            setattr(self, name, getattr(self, name)[rows_B])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.durations_BL, self.memory_BL, self.elapsed_B, self.memory_total_B]
