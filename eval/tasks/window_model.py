"""A stock model that reads through StreamingLLM's window, beside the models of a grid.

Axes: B rows, N tokens of a prompt, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from condense import CondenseConfig

from ..models import EvaluatedModel
from .window_attention import WINDOW_SINKS, attend_to_window


def window_name(name: str, window: int) -> str:
    """Returns the name in tables and pictures of a model that is read through a window."""
    return f"{name}, window of {window} keys, {WINDOW_SINKS} of them sinks"


class WindowModel(EvaluatedModel):
    """A stock model whose layers attend to the last `window` keys, the text's first ones (sinks) among them."""

    def __init__(self, stock: EvaluatedModel, window: int):
        self.name = window_name(stock.name, window)
        self.source, self.tokenizer, self.config = stock.source, stock.tokenizer, stock.config
        self._stock, self.window = stock, window

    @property
    def model(self) -> Any:
        return self._stock.model

    def describe(self) -> dict[str, Any]:
        return self._stock.describe() | {"name": self.name, "window": self.window}

    @torch.no_grad()
    def complete(self, prompt_ids_BN: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, int]:
        """Returns the likeliest tokens [B, new] after prompts, and the bytes of one prompt's window. Each token reads
        the text again."""
        rows, model = [], self.model
        with attend_to_window(model, self.window, WINDOW_SINKS):
            for ids_N in prompt_ids_BN.to(model.device):
                for _ in range(new_tokens):
                    logits_V = model(ids_N[None], use_cache=False, logits_to_keep=1).logits[0, -1]
                    ids_N = torch.cat([ids_N, logits_V.argmax()[None]])
                rows.append(ids_N[prompt_ids_BN.shape[1] :])
        return torch.stack(rows), self._window_bytes()

    def _window_bytes(self) -> int:
        config = self.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (
            2 * config.num_hidden_layers * config.num_key_value_heads * width * self.window * self.model.dtype.itemsize
        )


def check_window(window: int | None, models: Sequence[EvaluatedModel], device_map: str | None) -> None:
    """Raises `ValueError` for a window that is too small, and one without a stock model."""
    if window is None:
        return
    if device_map is not None:
        raise ValueError(f"--device-map {device_map} does not go with --window: leave one of them out.")
    if window <= WINDOW_SINKS:
        raise ValueError(f"--window {window} has {WINDOW_SINKS} sinks: give it more keys.")
    if all(model.config.model_type == CondenseConfig.model_type for model in models):
        raise ValueError(f"--window {window} is of a stock model, and all are folded: add --model STOCK.")


def with_window(models: Sequence[EvaluatedModel], window: int | None, device_map: str | None) -> list[EvaluatedModel]:
    """Returns the models, and behind the first stock one the same through a window, unless that is None."""
    check_window(window, models, device_map)
    if window is None:
        return [*models]
    at = next(at for at, model in enumerate(models) if model.segment_length is None)
    return [*models[: at + 1], WindowModel(models[at], window), *models[at + 1 :]]
