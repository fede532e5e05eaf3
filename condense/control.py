"""The control of a model with a depth block: a vector for each text, or for each token.

Axes: B rows of a batch, N columns of an input, R rows of a chunk, T tokens of a chunk, C components of the control.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from .segmentation import Chunk, UnpaddedBatch, on_device

logger = logging.getLogger(__name__)


def check_control(control_size: int, control: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raises `ValueError` for a control that does not fit an input of shape [B, N]."""
    if not control_size:
        raise ValueError("control is given, and the model has no depth block that takes one: leave it out.")
    fits = (shape[0], control_size), (*shape, control_size)
    if tuple(control.shape) not in fits:
        raise ValueError(
            f"control of shape {tuple(control.shape)} does not fit: pass {control_size} components for each text, "
            f"{fits[0]}, or for each token, {fits[1]}."
        )
    at_hand = control.device.type == "cpu" and not torch.compiler.is_exporting()  # an accelerator would have to wait
    if at_hand and not bool(torch.isfinite(control).all()):
        raise ValueError("control has values that are not finite: pass finite numbers.")


def check_control_of_prompt(arguments: Mapping[str, Any], is_assistant: bool = False) -> None:
    """Raises `ValueError` for a control that is not a tensor of texts or of tokens, or ends before the prompt does.

    `generate` has prepared the `arguments`: it drops a mask without padding and keeps the positions. The prompt of an
    assistant may be longer than the control, because it includes generated tokens.
    """
    control, mask, positions = (arguments.get(name) for name in ("control", "attention_mask", "position_ids"))
    if control is None:
        return
    if not isinstance(control, torch.Tensor) or control.dim() not in (2, 3):
        raise ValueError(f"control={control!r}: pass a tensor [texts, components] or [texts, tokens, components].")
    columns = positions if mask is None else mask
    if columns is not None and control.dim() == 3 and control.shape[1] < columns.shape[1] and not is_assistant:
        raise ValueError(
            f"control has {control.shape[1]} columns and the prompt {columns.shape[1]}: pass one for each token, or "
            "one for each text. New tokens have the control of their column, or of the last one."
        )


def drafts_with_control(model: Any, assistant: Any, assistant_tokenizer: Any) -> bool:
    """Returns whether an assistant (None: the model itself) takes the model's control for its drafts."""
    size = getattr((assistant or model).config, "control_size", 0)
    return size == model.config.control_size and assistant_tokenizer is None


def zero_control(control_size: int, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns zeros [B, C], with the dtype of `weight`; logs once per process that no control was given."""
    _say_zero(control_size)
    return torch.zeros(len(inputs), control_size, dtype=weight.dtype, device=inputs.device)


@functools.cache
def _say_zero(control_size: int) -> None:
    logger.warning("no control is given: the %d components of the depth block's control are 0.", control_size)


def control_of_chunk(control: torch.Tensor, batch: UnpaddedBatch, chunk: Chunk) -> torch.Tensor:
    """Returns the chunk's part [R, T, C], or [R, 1, C] for a control of each text."""
    if control.dim() == 3:
        return batch.gather(control, chunk)
    rows = slice(None) if chunk.all_rows else on_device(torch.tensor(chunk.rows), control.device)
    return control[rows][:, None]


def control_of_columns(control: torch.Tensor, seen: int, num_columns: int) -> torch.Tensor:
    """Returns the control [B, num_columns, C] of the columns after `seen`: new ones get the control of the last column.

    A control for each text stays as it is.
    """
    if control.dim() == 2:
        return control
    columns = torch.arange(seen, seen + num_columns).clamp(max=control.shape[1] - 1)
    return control[:, columns.to(control.device)]
