"""The objectives that a recipe can train for, by kind: a kind computes the loss of a batch.

Another kind is a subclass of `ObjectiveKind`, registered with `@OBJECTIVES.register`.

Axes: B rows, N tokens, S segments.
"""

from abc import abstractmethod
from typing import Any, Literal, NamedTuple

import torch

from condense.configuration import IGNORE_INDEX

from .section import Registry, Section


class Losses(NamedTuple):
    """The loss to minimise, and its sums and numbers of targets by segment (S = 1 for a model without segments)."""

    loss: torch.Tensor  # summed over targets, divided by `num_targets`
    sums_S: torch.Tensor
    targets_S: torch.Tensor


class ObjectiveKind(Section):
    kind: str

    @abstractmethod
    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        """The loss of a micro-batch whose optimizer step has `num_targets` targets over all micro-batches and ranks.

        `batch` has `input_ids` and `labels` [B, N], and an `attention_mask` where rows are padded.
        """


OBJECTIVES = Registry[ObjectiveKind](default="next_token")


@OBJECTIVES.register
class NextToken(ObjectiveKind):
    """Cross-entropy of each next token, by the model's own forward pass."""

    kind: Literal["next_token"] = "next_token"

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        output = model(**batch, num_items_in_batch=num_targets, use_cache=False)
        if getattr(output, "segment_losses", None) is not None:
            return Losses(output.loss, output.segment_losses, output.segment_targets)
        num_own = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
        return Losses(output.loss, (output.loss.detach() * num_targets)[None], num_own[None])
