"""The passes of a run: the rows and segments of a micro-batch, for each length of its texts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import LlamaConfig

from condense import CondenseConfig, CondenseForCausalLM

from ..adapters import adapter_shapes, check_targets
from ..distillation import Distillation
from ..recipe import Recipe
from ..recipe.models import stock_class
from ..recipe.objectives import NextToken

FLOAT32 = 4  # bytes
PLANNED_KINDS = ("condense", "stock")  # of models


def check_planned(recipe: Recipe) -> None:
    """Raises `ValueError` for models and objectives whose memory is not estimated."""
    objective = recipe.objective
    unknown = None
    if recipe.model.kind not in PLANNED_KINDS:
        unknown = f"model.kind={recipe.model.kind!r}"
    elif isinstance(objective, Distillation) and objective.hidden_weight:
        unknown = f"objective.kind={objective.kind!r} with a hidden_weight"
    elif not isinstance(objective, NextToken | Distillation):
        unknown = f"objective.kind={objective.kind!r}"
    if unknown is not None:
        raise ValueError(f"the memory of {unknown} is not estimated: start the run to see it.")


@dataclass(frozen=True)
class Pass:
    """The rows and segments that a rank runs at once."""

    rows: int
    segments: list[int]  # tokens of each; a stock Llama has one

    @property
    def tokens(self) -> int:
        return self.rows * sum(self.segments)


def passes(config: LlamaConfig, recipe: Recipe, ranks: int) -> list[Pass]:
    """Returns a pass for each length of the recipe's texts; a curriculum's shorter texts have more rows."""
    length = recipe.model.tokens_per_segment(config)
    if recipe.curriculum:
        assert length is not None
        recipe.curriculum.check_holds_longest(length, ranks)
        tokens = recipe.curriculum.tokens_per_step // ranks
        return [Pass(tokens // (number * length), [length] * number) for number in recipe.curriculum.lengths]
    return [Pass(recipe.micro_batch, segments_of(stage.total_length, length)) for stage in recipe.stages or ()]


def longest_passes(config: LlamaConfig, recipe: Recipe, ranks: int) -> list[Pass]:
    """Returns the passes that may need most memory: the longest stage, or of a curriculum the first length, which has
    most rows, the last, and the one with most tokens."""
    found = passes(config, recipe, ranks)
    most = max(found, key=lambda each: each.tokens)
    if not recipe.curriculum:
        return [most]
    return [one for number, one in enumerate(found) if number in (0, len(found) - 1) or one is most]


def segments_of(total_length: int, length: int | None) -> list[int]:
    """Returns the tokens of each segment of a text; `length` is None for a text read as a whole."""
    length = length or total_length
    return [min(length, total_length - start) for start in range(0, total_length, length)]


class Weights(NamedTuple):
    """Shapes of the trained weights, in the model's order, and the number of frozen ones."""

    trained: list[torch.Size]
    num_frozen: int

    @property
    def num_trained(self) -> int:
        return sum(shape.numel() for shape in self.trained)


def weights_of(config: LlamaConfig, recipe: Recipe) -> Weights:
    """Returns a model's weights, tied ones once. Raises `ValueError` for adapters of maps that it does not have."""
    model = _on_meta(config)
    shapes = [parameter.shape for parameter in model.parameters()]
    if recipe.lora is None:
        return Weights(shapes, 0)
    check_targets(model, recipe.lora)
    return Weights(adapter_shapes(model, recipe.lora), sum(shape.numel() for shape in shapes))


def parameter_shapes(config: LlamaConfig) -> list[torch.Size]:
    """Returns the shape of every parameter, tied ones once, in the model's order."""
    return [parameter.shape for parameter in _on_meta(config).parameters()]


def _on_meta(config: LlamaConfig) -> torch.nn.Module:
    model_class = CondenseForCausalLM if isinstance(config, CondenseConfig) else stock_class(config)
    with torch.device("meta"):
        return model_class(config)


def element_size(recipe: Recipe) -> int:
    return 2 if recipe.dtype == "bfloat16" else FLOAT32
