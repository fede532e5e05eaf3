"""Jitter of durations: the model trains on durations near one unit, drawn anew each time."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from condense.training.distributed import Process
from condense.training.draws import uniform
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses


@OBJECTIVES.register
class DurationJitter(ObjectiveKind):
    """Next tokens of texts whose tokens last 1 - jitter to 1 + jitter units; one unit in validation."""

    kind: Literal["duration_jitter"] = "duration_jitter"
    predicts_next_tokens: ClassVar[bool] = True
    needs_folded: ClassVar[bool] = True

    jitter: float = Field(0.1, gt=0, lt=1, description="the furthest that a duration is from one unit")

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        return next_token_losses(model, batch | {"durations": self.durations(batch["input_ids"])}, num_targets)

    def durations(self, ids_BN: torch.Tensor) -> torch.Tensor:
        """Returns new durations [B, N], from torch's generator, in the same state on all ranks, and the rank."""
        seed, rank = int(torch.randint(2**62, ())), torch.tensor(Process.from_environment().rank)
        rows_B1, columns_N = torch.arange(len(ids_BN))[:, None], torch.arange(ids_BN.shape[1])
        drawn_BN = uniform(seed, rank, rows_B1, columns_N)
        return (1 + self.jitter * (2 * drawn_BN - 1)).float().to(ids_BN.device)

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        return next_token_losses(model, batch, 1)
