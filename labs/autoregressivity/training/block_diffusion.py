"""Masked diffusion within blocks of a folded Llama's segments.

Axes: B rows, N tokens.
"""

import zlib
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from condense.training.recipe.data import GeneratedData, SampleData, TextData
from condense.training.recipe.models import check_implemented
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind

from ..model import likelihood_bound, to_block_diffusion
from ..model.block_diffusion import ATTENTION, block_config


@OBJECTIVES.register
class BlockDiffusion(ObjectiveKind):
    """A bound on the negative log likelihood of texts written one block at a time, with one draw per block.

    Blocks of one token are next-token prediction. The trained model is a `BlockDiffusionForCausalLM`.
    """

    kind: Literal["block_diffusion"] = "block_diffusion"
    block_length: int | None = Field(None, ge=1, description="tokens that are written at a time; None: a segment")

    needs_folded: ClassVar[bool] = True

    def check(self, recipe: Any) -> None:
        length = recipe.model.segment_length
        if length is not None and self.block_length is not None and length % self.block_length:
            raise ValueError(
                f"objective.block_length={self.block_length} does not divide model.segment_length={length}: choose a "
                "divisor of it"
            )
        if recipe.gradient_checkpointing:
            raise ValueError("objective.kind='block_diffusion' has no gradient checkpointing: set it to false")
        data = recipe.data
        if isinstance(data, TextData) and data.fit == "pack":
            raise ValueError("objective.kind='block_diffusion' takes texts of one length: set data.fit=cut")
        may_be_alike = isinstance(data, TextData | SampleData) or (
            isinstance(data, GeneratedData) and data.shortest == 1
        )
        if recipe.micro_batch > 1 and not may_be_alike:
            raise ValueError(
                "objective.kind='block_diffusion' takes texts of one length in a micro-batch, and those of data.task="
                f"{data.task} differ: set micro_batch=1"
            )
        if isinstance(data, GeneratedData) and data.background:
            raise ValueError(
                f"objective.kind='block_diffusion' predicts all tokens after the first label, and data.background="
                f"{data.background} labels single tokens: set it to 0"
            )
        check_implemented(recipe.attention, ("auto", *ATTENTION), "objective.kind='block_diffusion'")

    def check_model(self, config: Any, tokenizer: Any, recipe: Any) -> None:
        block_config(config, self.block_length)

    def obstacle_to_zero_3(self) -> str:
        return "objective.kind='block_diffusion' makes its model of whole weights"

    def prepare_model(self, model: Any, recipe: Any) -> Any:
        return to_block_diffusion(model, self.block_length)

    def num_targets(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().num_targets({"labels": batch["labels"][:, 1:]})

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        return self._losses(model, batch, num_targets, None)

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        """Returns the bound, with draws that depend only on each text, so validations compare."""
        found = []
        for row in range(len(batch["labels"])):
            text = {name: value[row : row + 1] for name, value in batch.items()}
            seed = zlib.crc32(text["input_ids"].cpu().numpy().tobytes())
            found.append(self._losses(model, text, 1, torch.Generator().manual_seed(seed)))
        losses, sums, targets = zip(*((one.loss, one.sums_S, one.targets_S) for one in found), strict=True)
        return Losses(torch.stack(losses).sum(), torch.stack(sums).sum(0), torch.stack(targets).sum(0))

    def _losses(self, model, batch, num_targets, generator: torch.Generator | None) -> Losses:
        if "attention_mask" in batch:  # keys of as many digits may have different numbers of tokens
            raise ValueError(
                "objective.kind='block_diffusion' takes texts of one length in a micro-batch, and these differ: set "
                "micro_batch=1"
            )
        loss = likelihood_bound(model, batch["input_ids"], batch["labels"], generator).sum()
        return Losses(loss / num_targets, loss.detach()[None], self.num_targets(batch)[None])
