"""Task subdivision: a text is predicted in k times fewer steps of k tokens each."""

from typing import Any, Literal

import torch
from pydantic import Field

from condense.configuration import IGNORE_INDEX
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses

from ..model.multi_token import MultiTokenForCausalLM, targets_of_heads


@OBJECTIVES.register
class MultiToken(ObjectiveKind):
    """Cross-entropy of the next k tokens with k heads, averaged over all pairs of a reading token and a target.

    The validation loss is the next-token loss of the first head. `as_generated` is the mean over the same targets, each
    from the head that writes it when tokens are generated in blocks of k.
    """

    kind: Literal["multi_token"] = "multi_token"
    tokens: int = Field(ge=1, description="heads: tokens that are written in a step")

    def check(self, recipe: Any) -> None:
        shortest = min((stage.total_length for stage in recipe.stages or ()), default=None)
        if shortest is not None and shortest <= self.tokens:
            raise ValueError(
                f"objective.tokens={self.tokens}: in texts of total_length={shortest} the last head has no target; "
                f"choose at most {shortest - 1} tokens, or longer texts"
            )

    def obstacle_to_zero_3(self) -> str | None:
        return "objective.kind='multi_token' adds heads to the model" if self.tokens > 1 else None

    def prepare_model(self, model: Any, recipe: Any) -> Any:
        return model if self.tokens == 1 else MultiTokenForCausalLM.from_base(model, self.tokens)

    def num_targets(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.tokens == 1:
            return super().num_targets(batch)
        targets_BNk = targets_of_heads(batch["labels"], batch.get("attention_mask"), self.tokens)
        return targets_BNk.ne(IGNORE_INDEX).sum()

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        return next_token_losses(model, batch, num_targets)

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        if self.tokens == 1:
            return next_token_losses(model, batch, 1)
        inputs: dict[str, Any] = {**batch}
        first = next_token_losses(model, inputs | {"supervised": "first_head"}, 1)
        as_generated = next_token_losses(model, inputs | {"supervised": "as_generated"}, 1)
        return first._replace(further={"as_generated": as_generated})
