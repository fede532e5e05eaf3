"""Ablation of complete supervision: the softmax of each target leaves out some of the other logits.

Axes: B rows, N tokens, n targets, V vocabulary.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from pydantic import Field

from condense.configuration import IGNORE_INDEX
from condense.training.draws import uniform
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, losses_by_segment, next_token_losses

LOGITS_AT_ONCE = 2**22  # a draw takes some tens of bytes


@OBJECTIVES.register
class PartialLogits(ObjectiveKind):
    """Leaves out each logit except the label's with probability `rate`, always the same ones at a place."""

    kind: Literal["partial_logits"] = "partial_logits"
    rate: float = Field(0.0, ge=0, lt=1, description="share of logits that a target's softmax leaves out; 0: none")
    seed: int = Field(0, ge=0, description="of the choice of the logits")

    needs_places: ClassVar[bool] = True

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        batch = dict(batch)
        places_B = batch.pop("places")
        if not self.rate:
            return next_token_losses(model, batch, num_targets)
        labels_BN = batch.pop("labels")[:, 1:]
        logits_BNV = model(**batch, use_cache=False).logits[:, :-1]
        columns_N = torch.arange(labels_BN.shape[1], device=labels_BN.device)  # predict; targets are one later
        counted_BN = labels_BN != IGNORE_INDEX
        places_n = (places_B[:, None] + columns_N + 1)[counted_BN]
        losses_n = self.cross_entropy(logits_BNV[counted_BN], labels_BN[counted_BN], places_n)
        config = extract_model_from_parallel(model).config
        return losses_by_segment(losses_n, counted_BN, getattr(config, "segment_length", None), num_targets)

    def cross_entropy(self, logits_nV: torch.Tensor, target_n: torch.Tensor, places_n: torch.Tensor) -> torch.Tensor:
        """Returns the loss [n] of each target, in float32 (float64 for float64 models)."""
        dtype = torch.promote_types(logits_nV.dtype, torch.float32)
        at_once = max(1, LOGITS_AT_ONCE // logits_nV.shape[-1])
        losses = []
        for logits, target, places in zip(*(t.split(at_once) for t in (logits_nV, target_n, places_n)), strict=True):
            hidden = self.hidden_logits(places, target, logits.shape[-1])
            losses.append(F.cross_entropy(logits.to(dtype).masked_fill(hidden, -torch.inf), target, reduction="none"))
        return torch.cat(losses)

    def hidden_logits(self, places_n: torch.Tensor, target_n: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns True [n, V] at the logits that the softmax of each target leaves out, never the target's own."""
        tokens_V = torch.arange(vocab_size, device=places_n.device)
        hidden_nV = uniform(self.seed, places_n[:, None], tokens_V) < self.rate
        hidden_nV &= tokens_V != target_n[:, None]
        assert not bool(hidden_nV.gather(1, target_n[:, None]).any())
        return hidden_nV

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        return next_token_losses(model, batch, 1)
