"""Jitter of durations: a model that trains on durations near one unit, each drawn anew."""

from typing import Any, Literal

import torch
from pydantic import Field

from .recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses


@OBJECTIVES.register
class DurationJitter(ObjectiveKind):
    """Next tokens of texts whose tokens last 1 - jitter to 1 + jitter units. Validation has durations of one unit."""

    kind: Literal["duration_jitter"] = "duration_jitter"
    jitter: float = Field(0.1, gt=0, lt=1, description="the furthest that a duration is from one unit")

    def check(self, recipe: Any) -> None:
        if recipe.model.kind != "condense":
            raise ValueError(
                f"objective.kind='duration_jitter' needs a model that takes durations, and model.kind="
                f"{recipe.model.kind!r} is none: set model.kind=condense"
            )

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        # By the generator of the device: a resumed run restores its state.
        drawn_BN = torch.rand(batch["input_ids"].shape, device=batch["input_ids"].device)
        return next_token_losses(model, batch | {"durations": 1 + self.jitter * (2 * drawn_BN - 1)}, num_targets)

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        return next_token_losses(model, batch, 1)
