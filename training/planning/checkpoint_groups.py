"""Chooses how many segments gradient checkpointing computes again at once, if the recipe gives no number."""

from math import ceil

from transformers import LlamaConfig

from condense.execution import default_checkpoint_segments

from ..deepspeed_file import deepspeed_settings
from ..recipe import Recipe
from ..recipe.models import CondenseModel
from ..recipe.objectives import NextToken
from .pass_memory import pass_memory
from .passes import Pass, element_size, passes
from .stack import stack_of

WAVE_SEGMENTS = 8


def with_checkpoint_segments(config: LlamaConfig, recipe: Recipe, ranks: int) -> Recipe:
    """Returns the recipe with a number as `model.checkpoint_segments`; unchanged without gradient checkpointing.

    None becomes the model's default. "auto" becomes the number that needs the least memory at the longest texts, the
    larger of equal ones: large groups store few memories and hold many activations.
    """
    model = recipe.model
    if not isinstance(model, CondenseModel) or not recipe.gradient_checkpointing:
        return recipe
    if model.checkpoint_segments is None:
        return _with(recipe, _default(config, recipe, ranks))
    if model.checkpoint_segments != "auto":
        return recipe
    longest = max(passes(config, recipe, ranks), key=lambda each: len(each.segments))
    candidates = [2**power for power in range(len(longest.segments).bit_length())]
    if model.schedule == "wavefront":
        candidates = [max(2, number) for number in candidates]  # a wave has at least two segments
    of_memory, of_segment = _bytes_of_segment(config, recipe, longest)

    def needed(group: int) -> int:
        return of_memory * ceil(len(longest.segments) / group) + of_segment * group

    return _with(recipe, min(reversed(candidates), key=needed))


def _bytes_of_segment(config: LlamaConfig, recipe: Recipe, longest: Pass) -> tuple[int, int]:
    """Returns the bytes of a segment's memories, and of its activations."""
    rows, length = longest.rows, longest.segments[0]
    memories = 2 * rows * length * config.num_key_value_heads * config.head_dim * stack_of(config).memories
    plain = recipe.model_copy(update={"gradient_checkpointing": False, "objective": NextToken()})
    (two, _), (three, _) = (pass_memory(config, plain, Pass(rows, [length] * number), "cpu") for number in (2, 3))
    return memories * element_size(recipe), three["activations"] - two["activations"]


def _default(config: LlamaConfig, recipe: Recipe, ranks: int) -> int:
    """Returns 1 if a GPU can't capture groups: with adapters, depth blocks or ZeRO-3."""
    assert isinstance(recipe.model, CondenseModel)
    if recipe.model.schedule == "wavefront":
        return WAVE_SEGMENTS
    zero_3 = deepspeed_settings(recipe)["zero_optimization"]["stage"] == 3
    has_depth = getattr(config, "depth", None) is not None
    if recipe.model.schedule == "sequential" or recipe.lora is not None or zero_3 or has_depth:
        return 1
    longest = max(len(each.segments) for each in passes(config, recipe, ranks))
    cell_tokens = recipe.micro_batch * recipe.model.tokens_per_segment(config)
    default = default_checkpoint_segments(config, cell_tokens, element_size(recipe))
    return min(default, 2 ** (longest.bit_length() - 1))


def _with(recipe: Recipe, segments: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"checkpoint_segments": segments})})
