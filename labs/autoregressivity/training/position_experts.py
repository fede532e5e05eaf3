"""Ablation of weight sharing: k models share out the positions of a text."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses
from condense.training.recipe.section import one_of

from ..model.position_experts import SPLITS, PositionExpertsForCausalLM


@OBJECTIVES.register
class PositionExperts(ObjectiveKind):
    """Cross-entropy of each next token under the model that owns its position, in training and in validation."""

    kind: Literal["position_experts"] = "position_experts"
    experts: int = Field(ge=1, description="models, which all start from the recipe's")
    split: Annotated[str, one_of(SPLITS)] = Field(
        "interval", description="interval: each has a part of the text; modulo: they take turns, token by token"
    )

    def check(self, recipe: Any) -> None:
        if self.experts == 1:
            return
        lengths = sorted({stage.total_length for stage in recipe.stages or ()})
        if self.split == "interval" and len(lengths) != 1:
            found = f"the stages have {lengths}" if lengths else "a curriculum has several lengths"
            raise ValueError(f"objective.split='interval' divides one total_length, and {found}: choose split=modulo")
        for length in lengths:
            if length % self.experts:
                raise ValueError(
                    f"objective.experts={self.experts} does not divide total_length={length}: change one of them"
                )

    def obstacle_to_zero_3(self) -> str | None:
        return "objective.kind='position_experts' makes copies of the model" if self.experts > 1 else None

    def prepare_model(self, model: Any, recipe: Any) -> Any:
        if self.experts == 1:
            return model
        length = recipe.stages[0].total_length if self.split == "interval" else None
        return PositionExpertsForCausalLM.from_base(model, self.experts, self.split, length)

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        return next_token_losses(model, batch, num_targets)
