"""Ablation of teacher forcing: the model runs freely for `steps` - 1 steps after each given token."""

from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from condense.configuration import IGNORE_INDEX
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses

from .feedback import free_running_losses


@OBJECTIVES.register
class FreeRunning(ObjectiveKind):
    """Input t of a text is the text's own if t is a multiple of `steps`, and the model's output otherwise.

    Unlabelled tokens, such as a prompt, are always given. The loss covers all targets.
    """

    kind: Literal["free_running"] = "free_running"
    steps: int = Field(1, ge=1, description="1: teacher forcing; the texts' length or more: none")
    feedback: Literal["argmax", "sample", "branch", "expected"] = Field(
        "argmax", description="what the model reads of its own output"
    )
    samples: int | None = Field(None, ge=1, description="branch: tokens that continue each leaf of the tree")
    width: int | None = Field(None, ge=1, description="branch: leaves of a text that remain")

    @model_validator(mode="after")
    def _check_tree(self):
        for name, value in (("samples", self.samples), ("width", self.width)):
            if (self.feedback == "branch") != (value is not None):
                raise ValueError(
                    f"{name}={value} with feedback={self.feedback}: feedback=branch needs it, and no other"
                )
        return self

    def obstacle_to_zero_3(self) -> str | None:
        return f"objective.steps={self.steps} gathers all weights for each token" if self.steps > 1 else None

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        if self.steps == 1:
            return next_token_losses(model, batch, num_targets)
        labels_BN = batch["labels"]
        given_N = torch.arange(labels_BN.shape[1], device=labels_BN.device) % self.steps == 0
        known_BN = given_N | (labels_BN == IGNORE_INDEX)
        return free_running_losses(
            model, batch, num_targets, known_BN, self.feedback, self.samples or 1, self.width or 1
        )

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        return next_token_losses(model, batch, 1)
