"""Durations: how long each token lasts.

A token of duration d_k weighs d_k in attention,

    y = sum_k softmax_k(q.k_k / sqrt(E) + log d_k) v_k,

and positions are cumulative durations, so they are fractional. With `position_anchor="end"` a token
sits where its interval ends, with `"start"` where it begins. All ones is the ordinary Transformer.

Axes: B rows, R rows taking part in a step, N tokens of an input, T tokens of a step, L segment length.
"""

import copy

import torch

from .segmentation import Alignment, Cursor, Piece

LONGEST_PAIR = 2**24  # units of time in two segments: float32, in which rotary tables are made, counts no further


def durations_from_time_steps(time_steps_BN: torch.Tensor, integration_start: float) -> torch.Tensor:
    """Durations [B, N] of tokens observed at the times `time_steps_BN`.

    d_1 = t_1 - integration_start and d_k = t_k - t_{k-1}. Raises `ValueError` where times do not
    increase strictly.
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
    """Raises `ValueError` unless durations are finite, not negative and of the input's shape."""
    if tuple(durations_BN.shape) != tuple(shape):
        raise ValueError(
            f"durations of shape {tuple(durations_BN.shape)} do not fit an input of shape {tuple(shape)}: "
            "give one duration per token."
        )
    if not durations_BN.is_floating_point():
        raise ValueError(f"durations are {durations_BN.dtype}: pass floating point numbers.")
    if durations_BN.requires_grad:
        raise ValueError("durations require gradients, which would miss the positions: pass durations.detach().")
    wrong = (~(torch.isfinite(durations_BN) & (durations_BN >= 0))).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the duration of token {token} in row {row} is {durations_BN[row, token].item()}: durations must be "
            "finite and not negative."
        )


class Timeline:
    """The durations that a batch's memory and current segment carry, and the coordinates they give.

    Kept on the host in float64: the numbers are few, positions stay exact, and no check waits for a
    device. Coordinates are local to the pair (memory, current segment), since rotary attention
    depends on differences alone.
    """

    def __init__(self, cursor: Cursor, anchor: str):
        self.anchor = anchor
        # What went before without durations lasted one unit a token.
        self.durations_BL = torch.ones(len(cursor.filled), cursor.segment_length, dtype=torch.float64)
        self.memory_BL = torch.ones_like(self.durations_BL)
        self.elapsed_B = torch.tensor(cursor.filled, dtype=torch.float64)
        self.memory_total_B = cursor.segment_length * (torch.tensor(cursor.segments) > 0).double()

    @staticmethod
    def known_durations(durations_BN: torch.Tensor | None, alignment: Alignment) -> torch.Tensor:
        """Durations [B, N] on the host: of one unit where none were given, and at padding."""
        if durations_BN is None:
            return torch.ones(alignment.batch_size, alignment.num_columns)
        durations_BN = durations_BN.cpu()
        return durations_BN if alignment.mask_BN is None else durations_BN.where(alignment.mask_BN, 1.0)

    def advance(self, durations_RT: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the durations of a piece's tokens.

        Returns the tokens' coordinates [R, T] in this segment (after the memory) and as the next
        segment's memory. Raises `ValueError` where a token could see nothing of positive duration.
        """
        rows_R = torch.tensor(piece.rows)
        step_RT = durations_RT.to("cpu", torch.float64)
        passed_RT = step_RT.cumsum(1) + self.elapsed_B[rows_R, None]
        seen_RT = passed_RT + self.memory_total_B[rows_R, None]
        blind = (seen_RT <= 0).nonzero()
        if len(blind):
            row, token = blind[0].tolist()
            raise ValueError(
                f"in row {piece.rows[row]}, token {piece.filled[row] + token} of segment {piece.segments[row] + 1} and "
                "all it can see have duration 0: attention would have nothing to weigh. Give some token of the last "
                "segment, or of this one up to here, a positive duration."
            )
        # Shifted by one unit at anchor "end": unit durations then count 0, 1, 2 ... as in the stock Llama.
        local_RT = passed_RT - (1.0 if self.anchor == "end" else step_RT)
        coordinates_RT = local_RT + self.memory_total_B[rows_R, None]
        far = (coordinates_RT > LONGEST_PAIR).nonzero()
        if len(far):
            row, token = far[0].tolist()
            raise ValueError(
                f"in row {piece.rows[row]}, durations add up to {coordinates_RT[row, token].item():g} within two "
                f"segments at token {piece.filled[row] + token} of segment {piece.segments[row] + 1}; beyond "
                f"{LONGEST_PAIR:,} float32 positions no longer tell tokens apart. Divide all durations by one factor."
            )

        row_n, offset_n = piece.valid
        position_n = torch.tensor(piece.filled)[row_n] + offset_n
        self.durations_BL = self.durations_BL.index_put((rows_R[row_n], position_n), step_RT[row_n, offset_n])
        last_R = torch.tensor(piece.counts)[:, None] - 1
        self.elapsed_B = self.elapsed_B.index_put((rows_R,), passed_RT.gather(1, last_R)[:, 0])
        return coordinates_RT, local_RT

    def rehearse(self, durations_BN: torch.Tensor, alignment: Alignment, cursor: Cursor) -> None:
        """Raises what `advance` would raise over a whole input, and changes nothing."""
        timeline, cursor = copy.deepcopy((self, cursor))
        for piece in cursor.pieces(alignment.lengths):
            timeline.advance(alignment.take(durations_BN, piece), piece)
            timeline.roll([piece.rows[r] for r in piece.completed])

    def log_durations(self, rows: list[int]) -> torch.Tensor:
        """The logarithms [R, 2L] of the durations of [memory ; current segment]."""
        return torch.cat([self.memory_BL[rows], self.durations_BL[rows]], dim=1).log()

    def roll(self, rows: list[int]) -> None:
        """The current segment of `rows` is complete and becomes their memory."""
        rows_R = torch.tensor(rows, dtype=torch.long)
        self.memory_BL = self.memory_BL.index_put((rows_R,), self.durations_BL[rows_R])
        self.memory_total_B = self.memory_total_B.index_put((rows_R,), self.elapsed_B[rows_R])
        self.elapsed_B = self.elapsed_B.index_put((rows_R,), torch.zeros(len(rows), dtype=torch.float64))

    def select(self, rows_B: torch.Tensor) -> None:
        """Keeps and repeats rows, as beam search does."""
        for name in ("durations_BL", "memory_BL", "elapsed_B", "memory_total_B"):
            setattr(self, name, getattr(self, name)[rows_B])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.durations_BL, self.memory_BL, self.elapsed_B, self.memory_total_B]
