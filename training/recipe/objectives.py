"""The objectives of a recipe, by kind: a kind computes the loss of a batch.

A new kind is a subclass of `ObjectiveKind`, registered with `@OBJECTIVES.register`.

Axes: B rows, N tokens, S segments, n targets.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from condense import laboratories
from condense.configuration import IGNORE_INDEX

from .section import Registry, Section


class Losses(NamedTuple):
    """The loss to minimise, and its sums and numbers of targets by segment (S = 1 for a model without segments).

    `further` has other losses of a validation batch; `NAME` is logged as `eval_loss_NAME`.
    """

    loss: torch.Tensor  # summed over targets, divided by `num_targets`
    sums_S: torch.Tensor
    targets_S: torch.Tensor
    further: "Mapping[str, Losses]" = MappingProxyType({})


class ObjectiveKind(Section):
    """The interface of an objective."""

    kind: str

    # Whether batches have `places` [B]: the place in the data of each row's first token, the same in every epoch, on
    # every rank and after a resume. Only documents have places.
    needs_places: ClassVar[bool] = False
    # Whether the trained model's forward pass predicts next tokens: validation can then count answers.
    predicts_next_tokens: ClassVar[bool] = False
    takes_adapters: ClassVar[bool] = False
    needs_folded: ClassVar[bool] = False  # whether the model must be a folded one
    is_of_images: ClassVar[bool] = False

    def check(self, recipe: Any) -> None:
        """Raises `ValueError` for other keys of the recipe that do not fit this objective."""

    def check_model(self, config: Any, tokenizer: Any, recipe: Any) -> None:
        """Raises `ValueError` for a model that does not fit, before its weights and any documents are read."""

    def obstacle_to_zero_3(self) -> str | None:
        """Returns what this objective can't do with weights that ZeRO-3 has divided among ranks; None for nothing."""
        return None

    def prepare_model(self, model: Any, recipe: Any) -> Any:
        """Returns the model to train, made of the recipe's before a checkpoint is loaded."""
        return model

    def num_targets(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the number of targets in a micro-batch; the sum over micro-batches and ranks divides the loss."""
        return batch["labels"].ne(IGNORE_INDEX).sum()

    @abstractmethod
    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        """Returns the loss of a micro-batch whose optimizer step has `num_targets` targets on all ranks together.

        `batch` has `input_ids` and `labels` [B, N], and an `attention_mask` if rows are padded.
        """

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        """Returns the losses of a validation batch: the training loss, or what compares with other objectives."""
        return self.losses(model, batch, 1)


OBJECTIVES = Registry[ObjectiveKind](
    default="next_token", elsewhere={"distill": "condense.training.distillation:Distillation"} | laboratories.OBJECTIVES
)


@OBJECTIVES.register
class NextToken(ObjectiveKind):
    """Cross-entropy of each next token."""

    kind: Literal["next_token"] = "next_token"

    predicts_next_tokens: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        return next_token_losses(model, batch, num_targets)


def next_token_losses(model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
    """Returns the cross-entropy of next tokens, by the model's own forward pass."""
    output = model(**batch, num_items_in_batch=num_targets, use_cache=False)
    if getattr(output, "segment_losses", None) is not None:
        return Losses(output.loss, output.segment_losses, output.segment_targets)
    num_own = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
    return Losses(output.loss, (output.loss.detach() * num_targets)[None], num_own[None])


def losses_by_segment(
    loss_n: torch.Tensor, counted_BN: torch.Tensor, segment_length: int | None, num_targets: torch.Tensor | int
) -> Losses:
    """Sums the losses [n] of targets by the segments of the tokens that predict them, where `counted_BN` is true.

    `segment_length` is None for a model without segments.
    """
    columns_N = torch.arange(counted_BN.shape[1], device=counted_BN.device)
    segment_N = columns_N // (segment_length or len(columns_N))
    segment_n = segment_N.expand_as(counted_BN)[counted_BN]
    targets_S = torch.bincount(segment_n, minlength=int(segment_N[-1]) + 1)
    sums_S = torch.zeros_like(targets_S, dtype=loss_n.dtype).index_add(0, segment_n, loss_n.detach())
    return Losses(loss_n.sum() / num_targets, sums_S, targets_S)
