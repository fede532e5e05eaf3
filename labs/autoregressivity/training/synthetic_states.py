"""Synthetic states between the tokens of a text: more and smaller steps on the line from one embedding to the next.

A state between two tokens depends on the second, so it may be read only once that token is known. Everything that
predicts a token therefore comes before it, and before the states that lead to it:

    x(0) ... x(t-1), s(t,1) ... s(t,n), x(t) | x(t+1)        s(t,j) = x(t-1) + j / (n + 1) (x(t) - x(t-1))

Axes: B rows, N tokens, M = (n + 1) N states, D hidden size.
"""

from typing import Any, Literal

import torch
from accelerate.utils import extract_model_from_parallel
from pydantic import Field

from condense.configuration import IGNORE_INDEX
from condense.training.recipe.data import GeneratedData
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses


@OBJECTIVES.register
class SyntheticStates(ObjectiveKind):
    """Reads each token in `states` + 1 steps; the last step is the token's own embedding.

    The target of each step is the token after the one it leads to; no step so far depends on it. The training loss is
    the mean over all steps. The validation loss covers only the last steps, so each next token counts once.
    """

    kind: Literal["synthetic_states"] = "synthetic_states"
    states: int = Field(ge=0, description="states before each token, on the way from the token before; 0: none")
    path: Literal["line", "repeat"] = Field(
        "line", description="line: points between both embeddings; repeat: the token's own, as many times"
    )

    def check(self, recipe: Any) -> None:
        if self.states and isinstance(recipe.data, GeneratedData):
            raise ValueError(
                f"objective.states={self.states}: the accuracy of answers (data.task={recipe.data.task}) is counted "
                "without synthetic states; choose another data.task, or states=0"
            )
        self._check_segments(getattr(recipe.model, "segment_length", None))

    def _check_segments(self, length: int | None) -> None:
        if length is not None and length % (self.states + 1):
            raise ValueError(
                f"model.segment_length={length} counts states, {self.states + 1} for each token with objective.states="
                f"{self.states}: choose a multiple of {self.states + 1}"
            )

    def check_model(self, config: Any, tokenizer: Any, recipe: Any) -> None:
        self._check_segments(getattr(config, "segment_length", None))  # even if the recipe does not set it

    def obstacle_to_zero_3(self) -> str | None:
        return "objective.kind='synthetic_states' reads embeddings outside of the model" if self.states else None

    def num_targets(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.states:
            return super().num_targets(batch)
        return labels_of_states(batch["labels"], self.states)[:, 1:].ne(IGNORE_INDEX).sum()

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        return next_token_losses(model, self.read(model, batch), num_targets)

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        return next_token_losses(model, self.read(model, batch, every_state=False), 1)

    def read(self, model: Any, batch: dict[str, torch.Tensor], every_state: bool = True) -> dict[str, torch.Tensor]:
        """Returns the batch with the states of its tokens, and labels for every state or only for the tokens."""
        if not self.states:
            return batch
        embedded_BND = extract_model_from_parallel(model).get_input_embeddings()(batch["input_ids"])
        found = {
            "inputs_embeds": with_states(embedded_BND, self.states, self.path),
            "labels": labels_of_states(batch["labels"], self.states, every_state),
        }
        if "attention_mask" in batch:
            found["attention_mask"] = batch["attention_mask"].repeat_interleave(self.states + 1, dim=1)
        return found


def with_states(embedded_BND: torch.Tensor, states: int, path: str = "line") -> torch.Tensor:
    """Returns embeddings [B, M, D] with `states` states before each. The first token's states are its own embedding.

    Texts are padded on the right, where states can be anything.
    """
    if path == "repeat":
        return embedded_BND.repeat_interleave(states + 1, dim=1)
    before_BND = torch.cat([embedded_BND[:, :1], embedded_BND[:, :-1]], dim=1)
    share_S = torch.arange(1, states + 2, device=embedded_BND.device, dtype=embedded_BND.dtype) / (states + 1)
    return torch.lerp(before_BND[:, :, None], embedded_BND[:, :, None], share_S[:, None]).flatten(1, 2)


def labels_of_states(label_BN: torch.Tensor, states: int, every_state: bool = True) -> torch.Tensor:
    """Returns the labels [B, M] as models take them: the output at a state is compared with the label after it.

    So the label of token t + 1 follows each state of token t, or only token t itself.
    """
    first_BN1 = label_BN[:, :, None]
    after_BN = torch.cat([label_BN[:, 1:], torch.full_like(label_BN[:, :1], IGNORE_INDEX)], dim=1)
    further_BNS = after_BN[:, :, None].expand(-1, -1, states)
    if not every_state:
        further_BNS = torch.full_like(further_BNS, IGNORE_INDEX)
    return torch.cat([first_BN1, further_BNS], dim=2).flatten(1, 2)
