"""Ablation of frequent supervision: some targets are missing, the same ones throughout training.

Axes: B rows, N tokens.
"""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from condense.configuration import IGNORE_INDEX
from condense.training.draws import uniform
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses

from .feedback import free_running_losses


@OBJECTIVES.register
class MissingTargets(ObjectiveKind):
    """Drops the target at a place in the data with probability `rate`; the loss is the mean over the rest.

    Without `fixed`, the choice is drawn with torch's generator each time a text is read. The loss is then divided by
    the expected number of remaining targets.
    """

    kind: Literal["missing_targets"] = "missing_targets"
    rate: float = Field(0.0, ge=0, lt=1, description="share of targets that are missing; 0: none")
    unknown: Literal["ignore", "free_run"] = Field(
        "ignore", description="ignore: a missing target is still read; free_run: the likeliest token is read instead"
    )
    seed: int = Field(0, ge=0, description="of the choice of the missing targets")
    fixed: bool = Field(True, description="false: the missing targets are drawn anew each time, as a control")

    needs_places: ClassVar[bool] = True

    def obstacle_to_zero_3(self) -> str | None:
        runs = self.rate and self.unknown == "free_run"
        return "objective.unknown=free_run gathers all weights for each token" if runs else None

    def missing(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns True [B, N] at the labels that are missing; without `fixed`, each call draws others."""
        labels_BN, seed = batch["labels"], self.seed if self.fixed else int(torch.randint(2**62, ()))
        places_BN = batch["places"][:, None] + torch.arange(labels_BN.shape[1], device=labels_BN.device)
        return (uniform(seed, places_BN) < self.rate) & (labels_BN != IGNORE_INDEX)

    def num_targets(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        every = super().num_targets(batch)
        return every - self.missing(batch).sum() if self.fixed else (every * (1 - self.rate)).round().long()

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        missing_BN = self.missing(batch) if self.rate else None
        batch = {name: tensor for name, tensor in batch.items() if name != "places"}
        if missing_BN is None:
            return next_token_losses(model, batch, num_targets)
        batch["labels"] = batch["labels"].masked_fill(missing_BN, IGNORE_INDEX)
        num_targets = max(num_targets, 1)  # a step may be left without targets
        if self.unknown == "ignore":
            return next_token_losses(model, batch, num_targets)
        return free_running_losses(model, batch, num_targets, ~missing_BN, "argmax")

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        return next_token_losses(model, batch, 1)
