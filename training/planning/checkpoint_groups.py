"""The segments that gradient checkpointing computes again at once: what `model.checkpoint_segments=auto` stands for."""

from transformers import LlamaConfig

from ..recipe import Recipe
from ..recipe.models import CondenseModel
from .activations import kept_by_condense
from .passes import Pass, passes


def with_checkpoint_segments(config: LlamaConfig, recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with a number in the place of "auto": the one that needs the least memory at its longest texts.

    Large groups store few memories and hold many activations. Equal numbers of bytes go to the larger group. Without
    gradient checkpointing the recipe is as it was.
    """
    model = recipe.model
    if not isinstance(model, CondenseModel) or model.checkpoint_segments != "auto" or not recipe.gradient_checkpointing:
        return recipe
    longest = max(passes(config, recipe, ranks), key=lambda each: len(each.segments))
    candidates = [2**power for power in range(len(longest.segments).bit_length())]
    if model.schedule == "wavefront":
        candidates = [max(2, number) for number in candidates]  # a wave has at least two segments
    return min(
        (_with(recipe, number) for number in reversed(candidates)), key=lambda each: _bytes(config, each, longest)
    )


def _with(recipe: Recipe, segments: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"checkpoint_segments": segments})})


def _bytes(config: LlamaConfig, recipe: Recipe, a_pass: Pass) -> int:
    return sum(kept_by_condense(config, recipe, a_pass, zero_stage=0).values())
