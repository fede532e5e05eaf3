"""A sentence as a function of time: consecutive samples, each with a duration, from `integration_start` on.

Sample k has the value x_k from time t_{k-1} to t_k, so its duration is d_k = t_k - t_{k-1}; t_0 is the integration
start. The tokens of an ordinary sentence have durations of one unit.

Axes: N samples, D hidden size, n selected samples.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from condense.durations import LONGEST_PAIR, durations_from_time_steps
from condense.utils.choices import check_choice

from .spans import TextSpan

Span = slice | TextSpan | Sequence[int]


class Sentence:
    """Token ids [N] or embeddings [N, D], with durations [N] or time steps [N], and the integration start.

    Without durations and time steps, every sample lasts one unit. `positions` [N] replace the positions implied by the
    intervals (see `densify`). A sample's weight is its duration in both cases.

    A sentence is immutable: every operation returns a new one. Times are in float64 on the host; embeddings keep their
    device.

    Raises `ValueError` for parts that do not fit together, nonpositive durations, and time steps that do not increase.
    """

    def __init__(
        self,
        ids: torch.Tensor | Sequence[int] | None = None,
        embeddings: torch.Tensor | None = None,
        durations: torch.Tensor | Sequence[float] | None = None,
        time_steps: torch.Tensor | Sequence[float] | None = None,
        integration_start: float = 0.0,
        positions: torch.Tensor | Sequence[float] | None = None,
    ):
        if (ids is None) == (embeddings is None):
            raise ValueError("a sentence consists of ids or of embeddings: pass one of the two.")
        if durations is not None and time_steps is not None:
            raise ValueError("durations and time_steps contain the same information: pass one of the two.")
        self.ids_N = None if ids is None else torch.as_tensor(ids).cpu().clone()
        self.embeddings_ND = embeddings
        self._check_values()
        self.integration_start = float(integration_start)
        if time_steps is not None:
            times_N = self._numbers(time_steps, "time_steps")
            durations = durations_from_time_steps(times_N[None], self.integration_start)[0]
        durations = torch.ones(len(self)) if durations is None else durations
        self.durations_N = self._numbers(durations, "durations")
        self._check_durations()
        self.positions_N = None if positions is None else self._numbers(positions, "positions")
        times = [self.time_steps_N] if self.positions_N is None else [self.time_steps_N, self.positions_N]
        if not all(bool(torch.isfinite(one).all()) for one in times):
            raise ValueError(f"integration_start={integration_start} and positions={positions}: pass finite times.")

    def _check_values(self) -> None:
        values, is_ids = (self.embeddings_ND, False) if self.ids_N is None else (self.ids_N, True)
        assert values is not None
        if values.dim() != (1 if is_ids else 2) or values.is_floating_point() == is_ids or not len(values):
            raise ValueError(
                f"values of shape {tuple(values.shape)} and {values.dtype}: pass one row of at least one sample, token "
                "ids [N] or embeddings [N, D]."
            )

    def _check_durations(self) -> None:
        wrong = (~(torch.isfinite(self.durations_N) & (self.durations_N > 0))).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"the duration of sample {first} is {self.durations_N[first].item()}: pass durations that are finite "
                "and more than 0. To remove a sample, leave it out of the sentence."
            )
        if self.durations_N.sum() > LONGEST_PAIR:
            raise ValueError(
                f"the durations add up to {self.durations_N.sum().item():g}: above {LONGEST_PAIR:,} float32 positions "
                "do not distinguish tokens. Divide all durations by one factor."
            )

    def _numbers(self, values: torch.Tensor | Sequence[float], name: str) -> torch.Tensor:
        values_N = torch.as_tensor(values).detach().to("cpu", torch.float64, copy=True)
        if values_N.shape != (len(self),):
            raise ValueError(f"{name} of shape {tuple(values_N.shape)} for {len(self)} samples: give one per sample.")
        return values_N

    def __len__(self) -> int:
        values = self.ids_N if self.ids_N is not None else self.embeddings_ND
        assert values is not None
        return len(values)

    @property
    def time_steps_N(self) -> torch.Tensor:
        """Returns the end t_k of each sample's interval."""
        return self.integration_start + self.durations_N.cumsum(0)

    def _with(self, **parts) -> "Sentence":
        own: dict[str, Any] = {"ids": self.ids_N, "embeddings": self.embeddings_ND, "durations": self.durations_N}
        own |= {"integration_start": self.integration_start, "positions": self.positions_N}
        return Sentence(**(own | parts))

    def _check_no_positions(self, operation: str) -> None:
        if self.positions_N is not None:
            raise ValueError(f"{operation} moves samples, but these have fixed positions: do it before densify.")

    def with_embeddings(self, embeddings_ND: torch.Tensor) -> "Sentence":
        return self._with(ids=None, embeddings=embeddings_ND)

    def set_duration(self, span: Span, duration: float) -> "Sentence":
        """Sets the duration of each sample of the span; later samples shift accordingly."""
        self._check_no_positions("set_duration")
        return self._with(durations=self.durations_N.index_fill(0, self._indices(span), float(duration)))

    def shrink(self, span: Span, factor: float) -> "Sentence":
        """Multiplies the duration of each sample of the span by `factor`; later samples shift accordingly."""
        self._check_no_positions("shrink")
        indices_n = self._indices(span)
        return self._with(durations=self.durations_N.index_copy(0, indices_n, self.durations_N[indices_n] * factor))

    def scale(self, factor: float) -> "Sentence":
        """Multiplies all durations by `factor`: t_k becomes t_0 + factor (t_k - t_0)."""
        return self.shrink(slice(None), factor)

    def shift(self, amount: float) -> "Sentence":
        """Adds `amount` to all times, the integration start included; durations do not change."""
        self._check_no_positions("shift")
        return self._with(integration_start=self.integration_start + float(amount))

    def _indices(self, span: Span) -> torch.Tensor:
        known = range(len(self))
        span = span.tokens if isinstance(span, TextSpan) else span
        indices = set(known[span] if isinstance(span, slice) else map(int, span))
        if not indices or not indices <= set(known):
            raise ValueError(
                f"span {span} is invalid, the sentence has {len(self)} samples: pass indices from 0 to {len(self) - 1}."
            )
        return torch.tensor(sorted(indices))

    def densify(
        self,
        density: int,
        values: Literal["constant", "linear"] = "constant",
        positions: Literal["spread", "equal"] = "spread",
    ) -> "Sentence":
        """Replaces each sample by `density` samples, which share its duration equally.

        `values="constant"`: the new samples are copies, because x(t) = x_k between t_{k-1} and t_k. `"linear"`: x(t) is
        linear from x_{k-1} at t_{k-1} to x_k at t_k, and constant up to t_1; this needs embeddings.

        `positions="spread"`: each new sample has the position of its own part of the interval. `"equal"`: all have the
        position of the original sample at the anchor "end".
        """
        self._check_no_positions("densify")
        check_choice("positions", positions, ("spread", "equal"))
        check_choice("values", values, ("constant", "linear"))
        parts = {
            "ids": None if self.ids_N is None else self.ids_N.repeat_interleave(density),
            "durations": (self.durations_N / density).repeat_interleave(density),
        }
        if positions == "equal":
            parts["positions"] = self.time_steps_N.repeat_interleave(density)
        if self.embeddings_ND is not None:
            here_ND = self.embeddings_ND.repeat_interleave(density, dim=0)
            before_ND = torch.cat([self.embeddings_ND[:1], self.embeddings_ND[:-1]]).repeat_interleave(density, dim=0)
            share_n = (torch.arange(density) + 1).repeat(len(self)).to(here_ND) / density
            parts["embeddings"] = here_ND if values == "constant" else before_ND.lerp(here_ND, share_n[:, None])
        elif values == "linear":
            raise ValueError("values='linear' needs embeddings, but this sentence has ids: embed it first.")
        return self._with(**parts)


def interpolate(
    first: Sentence, second: Sentence, factor: float, how: Literal["linear", "spherical"] = "linear"
) -> Sentence:
    """Returns a sentence between two with the same number of samples: `first` at factor 0, `second` at factor 1.

    "linear": (1 - factor) x + factor y. "spherical": the direction turns from x to y at constant angular speed along
    the shortest arc, and the length changes linearly. Times always change linearly.

    Raises `ValueError` for sentences of unequal length, sentences without embeddings, and opposite directions.
    """
    if first.embeddings_ND is None or second.embeddings_ND is None:
        raise ValueError("token ids can't be interpolated: embed both sentences first.")
    if first.positions_N is not None or second.positions_N is not None:
        raise ValueError("samples with fixed positions can't be interpolated: do it before densify.")
    check_choice("how", how, ("linear", "spherical"))
    kinds = [(tuple(one.shape), one.dtype) for one in (first.embeddings_ND, second.embeddings_ND)]
    if kinds[0] != kinds[1]:
        (shape, dtype), (other_shape, other_dtype) = kinds
        raise ValueError(
            f"embeddings of shape {shape} in {dtype} do not fit shape {other_shape} in {other_dtype}: use one model "
            "for both sentences, and equally many samples."
        )
    between = torch.lerp if how == "linear" else _slerp
    return Sentence(
        embeddings=between(first.embeddings_ND, second.embeddings_ND, factor),
        durations=torch.lerp(first.durations_N, second.durations_N, factor),
        integration_start=first.integration_start + factor * (second.integration_start - first.integration_start),
    )


def _slerp(first_ND: torch.Tensor, second_ND: torch.Tensor, factor: float) -> torch.Tensor:
    first, second = first_ND.double(), second_ND.double()
    length_first_N1, length_second_N1 = first.norm(dim=1, keepdim=True), second.norm(dim=1, keepdim=True)
    first, second = first / length_first_N1.clamp(min=1e-300), second / length_second_N1.clamp(min=1e-300)
    first, second = first.where(length_first_N1 > 0, second), second.where(length_second_N1 > 0, first)  # 0: no turn
    angle_N1 = 2 * torch.atan2((first - second).norm(dim=1, keepdim=True), (first + second).norm(dim=1, keepdim=True))
    opposite = (angle_N1 > torch.pi - 1e-6).nonzero()
    if len(opposite):
        raise ValueError(
            f"the two embeddings of sample {int(opposite[0, 0])} have opposite directions, between which there is no "
            "shortest arc: use how='linear'."
        )
    sine_N1 = angle_N1.sin()
    turned = torch.sin((1 - factor) * angle_N1) / sine_N1 * first + torch.sin(factor * angle_N1) / sine_N1 * second
    # Between equal directions the straight line is the arc.
    direction = torch.where(angle_N1 > 1e-9, turned, first.lerp(second, factor))
    return (direction * length_first_N1.lerp(length_second_N1, factor)).to(first_ND.dtype)
