"""Parameters, steps, sequences, tokens and floating-point operations of a run. Nothing is run."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import LlamaConfig

from ..recipe import Recipe
from ..recipe.objectives import NextToken
from .passes import Weights, parameter_shapes, passes, segments_of, weights_of
from .stack import repeated_weights, stack_of


def count_operations(config: LlamaConfig, recipe: Recipe, ranks: int) -> dict[str, Any]:
    """Returns the run in numbers. A curriculum counts its last length.

    FLOPs exclude the second forward pass of checkpointing.
    """
    weights = weights_of(config, recipe)
    accumulation = recipe.accumulation(ranks)
    stage_passes = passes(config, recipe, ranks)
    if recipe.curriculum:
        stage_passes = stage_passes[-1:]
    steps = [recipe.steps] if recipe.curriculum else [stage.steps for stage in recipe.stages or ()]
    stages, flops = [], 0
    for stage_pass, num_steps in zip(stage_passes, steps, strict=True):
        sequences = stage_pass.rows * ranks * accumulation
        flops += num_steps * sequences * _text_flops(config, weights, stage_pass.segments)
        length = sum(stage_pass.segments)
        stages.append({"total_length": length, "steps": num_steps, "sequences_per_step": sequences})
    return {
        "parameters": weights.num_frozen + weights.num_trained,
        "trained_parameters": weights.num_trained,
        "ranks": ranks,
        "accumulation": accumulation,
        "sequences_at_once": stage_passes[-1].rows,
        "stages": stages,
        "tokens_per_step": max(stage["sequences_per_step"] * stage["total_length"] for stage in stages),
        "steps": sum(steps),
        "sequences": sum(stage["steps"] * stage["sequences_per_step"] for stage in stages),
        "tokens": sum(stage["steps"] * stage["sequences_per_step"] * stage["total_length"] for stage in stages),
        "flops": flops,
    }


def describe_uncounted(recipe: Recipe) -> str | None:
    """Says what the numbers of a run leave out; None for next tokens."""
    if isinstance(recipe.objective, NextToken):
        return None
    return (
        f"objective.kind={recipe.objective.kind!r}: parameters, operations, hours and MFU are counted for "
        "objective.kind='next_token', one pass of the recipe's model over each batch; what this objective adds is not"
    )


def text_flops(
    config: LlamaConfig, tokens_per_segment: int | None, weights: Weights | None = None
) -> Callable[[int], int]:
    """Returns a function from a text's tokens to its FLOPs, forward and backward, without checkpointing's second pass.

    All weights are trained, unless `weights` says which.
    """
    weights = weights or Weights(parameter_shapes(config), 0)
    return lambda tokens: _text_flops(config, weights, segments_of(tokens, tokens_per_segment))


def _text_flops(config: LlamaConfig, weights: Weights, segments: Sequence[int]) -> int:
    """Returns the FLOPs of a text, forward and backward.

    A token takes 6 for each trained weight, and 4 for each frozen one, whose gradient is not computed. An untied input
    embedding is looked up and does not count. A pair of a query and a key takes 12 per channel. The memories' keys and
    values are added. A depth block's field counts once for each evaluation. A sink, one token a pass, is not counted.
    """
    stack = stack_of(config)
    heads, key_width = config.num_attention_heads, config.num_key_value_heads * config.head_dim
    span = getattr(config, "bptt_segments", None)
    pairs, projected = 0, 0
    for number, tokens in enumerate(segments):
        pairs += tokens * (segments[0] if number else 0) + tokens * (tokens + 1) // 2
        if number < len(segments) - 1:
            projected += tokens * stack.projected(is_detached=span is not None and (number + 1) % span == 0)
    attention = stack.runs * 12 * heads * config.head_dim * pairs
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    own, adapters = weights.num_trained, 0
    if weights.num_frozen:
        own, adapters = weights.num_frozen, weights.num_trained
    per_weight = 4 if weights.num_frozen else 6
    memories = per_weight * 2 * config.hidden_size * key_width * projected
    multiplied = per_weight * (own - looked_up + repeated_weights(config, stack)) + 6 * adapters
    return round(multiplied * sum(segments)) + attention + memories
