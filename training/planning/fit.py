"""The largest micro-batch that a GPU holds, and the number of ranks that a recipe runs on."""

from collections.abc import Iterator
from typing import Any

from transformers import LlamaConfig

from condense.execution.selection import reason_for_sequential

from ..distillation import Distillation
from ..recipe import Recipe
from ..recipe.models import CondenseModel
from .checkpoint_groups import with_checkpoint_segments
from .memory import estimate
from .passes import Pass, element_size, passes

GIB = 2**30
NODE = 8  # ranks of a run whose machine is not known
# What the estimate does not count: the CUDA context, NCCL's buffers, what the allocator holds in fragments. An
# assumption.
UNCOUNTED = 5 * GIB


def default_ranks(config: LlamaConfig, recipe: Recipe, gpus: int) -> int:
    """Returns `gpus` if the recipe divides by it, or else the largest number up to a node's that it divides by."""
    return next((ranks for ranks in (gpus, *range(NODE, 0, -1)) if ranks and _divides(config, recipe, ranks)), 1)


def _divides(config: LlamaConfig, recipe: Recipe, ranks: int) -> bool:
    try:
        recipe.accumulation(ranks)
        passes(config, recipe, ranks)
    except ValueError:
        return False
    return True


def reasons_without_waves(
    config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: int, device: str = "cuda"
) -> dict[int, str | None]:
    """Returns why a run has no waves, by the length of its texts in tokens; None if it has waves."""
    recipe = with_checkpoint_segments(config, recipe, ranks)
    return {
        sum(a_pass.segments): _reason_without_waves(config, recipe, deepspeed, a_pass, device)
        for a_pass in passes(config, recipe, ranks)
    }


def _reason_without_waves(
    config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], a_pass: Pass, device: str
) -> str | None:
    if not isinstance(recipe.model, CondenseModel):
        return f"model.kind={recipe.model.kind} reads a text as a whole"
    if getattr(config, "depth", None) is not None:
        return "a depth block is not a layer like the others"
    if recipe.lora:
        return "adapters are beside the layers' weights"
    if isinstance(recipe.objective, Distillation) and recipe.objective.hidden_weight:
        return "objective.hidden_weight compares all layers' outputs"
    if recipe.model.schedule != "auto":
        return None if recipe.model.schedule == "wavefront" else f"model.schedule={recipe.model.schedule}"
    if deepspeed["zero_optimization"]["stage"] == 3:
        return "ZeRO-3 gathers one layer's weights at a time"
    whole = sum(tokens == a_pass.segments[0] for tokens in a_pass.segments)
    if recipe.gradient_checkpointing:
        assert isinstance(recipe.model.checkpoint_segments, int)
        if recipe.model.checkpoint_segments == 1:
            return "gradient checkpointing computes each segment again alone (model.checkpoint_segments=1)"
        whole = min(whole, recipe.model.checkpoint_segments)
    return reason_for_sequential(config, whole, a_pass.rows, device, element_size(recipe))


def propose(
    config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: int, gpu_memory: float
) -> list[dict[str, Any]]:
    """Returns the largest micro-batch that fits into `gpu_memory` GiB, without and with gradient checkpointing.

    Groups of segments become graphs only if memory is left for them. Rows have `gradient_checkpointing`, and either
    `error` or `micro_batch` (None for a curriculum), `needed` bytes, `overrides` of the recipe, and `without_waves`,
    the reasons by length. Raises `ValueError` if the recipe's batch does not divide by the number of ranks.
    """
    recipe.accumulation(ranks)
    rows = []
    for checkpointing in (False, True):
        row: dict[str, Any] = {"gradient_checkpointing": checkpointing}
        error, smallest = "", None
        for micro_batch in _micro_batches(recipe, ranks):
            changes: dict[str, bool | int] = {"gradient_checkpointing": checkpointing}
            changes |= {} if micro_batch is None else {"micro_batch": micro_batch}
            try:
                changed = Recipe.model_validate(recipe.model_dump(exclude_unset=True) | changes)
                size = estimate(config, changed, deepspeed, ranks, captures=False).total + UNCOUNTED
                smallest = size
            except ValueError as refusal:  # a combination that the recipe refuses
                error = error or str(refusal)
                continue
            if size <= gpu_memory * GIB:
                overrides = [f"{key}={str(value).lower()}" for key, value in changes.items()]
                without = reasons_without_waves(config, changed, deepspeed, ranks)
                row |= {"micro_batch": micro_batch, "needed": size, "overrides": overrides, "without_waves": without}
                break
        else:
            row["error"] = f"the smallest needs {smallest / GIB:.1f} GiB" if smallest else error
        rows.append(row)
    return rows


def _micro_batches(recipe: Recipe, ranks: int) -> Iterator[int | None]:
    """Yields sizes that divide the global batch, the largest first; None for a curriculum."""
    if recipe.curriculum:
        yield None
        return
    assert recipe.global_batch is not None
    per_rank = recipe.global_batch // ranks
    yield from (number for number in range(per_rank, 0, -1) if per_rank % number == 0)
