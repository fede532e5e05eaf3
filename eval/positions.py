"""Marks measurements of texts that have more tokens than a model has positions for.

A folded model needs positions for only two segments. Models without positions are never marked.
"""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .decoding import max_positions


def positions_exceeded(config: Any, num_tokens: int) -> int | None:
    """Returns the model's number of positions if a text is longer; else None."""
    known, segment_length = max_positions(config), getattr(config, "segment_length", None)
    needed = num_tokens if segment_length is None else min(num_tokens, 2 * segment_length)
    return known if known is not None and needed > known else None


def has_position_table(model: Any) -> bool:
    """Whether positions come from a table, as in GPT-2 and OPT, and so end with it."""
    known = max_positions(model.config)
    if known is None or not isinstance(model, PreTrainedModel):
        return False
    tokens = model.get_input_embeddings()
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one is not tokens]
    return any(known <= table.num_embeddings <= known + 2 for table in tables)  # OPT's has two more


def find_limits(task: Any) -> dict[str, int]:
    """Returns the number of positions of each model that reads longer texts in a task, by its name in the tables.

    Raises `ValueError` if a model's table of positions ends within a text.
    """
    found, longest = dict[str, int](), dict[str, int]()
    for item in task.items():
        if (positions := task.positions_exceeded(item)) is not None:
            model, num_tokens = task.model_of(item), task.num_tokens(item)
            if has_position_table(model.model):
                raise ValueError(
                    f"{model.name} has a table of {positions:,} positions and can't read texts of {num_tokens:,} "
                    "tokens: measure it only up to there, with a separate --output; a report shows both."
                )
            name = task.shown_as(item)
            found[name], longest[name] = positions, max(num_tokens, longest.get(name, 0))
    for name, positions in found.items():
        print(
            f"note: {name} reads texts of up to {longest[name]:,} tokens here, and has max_position_embeddings="
            f"{positions:,} in its config.json: figures beyond that are marked.",
            file=sys.stderr,
        )
    return found
