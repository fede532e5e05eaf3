"""The ways of reading a text that the cost of folding compares: each gives the loss of every token, without training.

- `full`: the stock model with full attention.
- `none`: each segment alone; with the sink, after its token.
- `window`: the last 2 L keys, with sinks the text's first 4 among them (StreamingLLM's: see `window_attention`).
- a memory share: the folded model; with the sink, its `sink_token_id`. `lowest` folds the lowest layer only.

Axes: N tokens of a text, S segments, L tokens of a segment, D hidden size.
"""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from condense.utils.memory_options import parse_share

from .variants import variant, variant_config
from .window_attention import WINDOW_SINKS, attend_to_window
from .windows import head_losses

FULL, NONE, WINDOW = "full", "none", "window"
LOWEST = "lowest"
ROW_TOKENS = 2**13  # of segments read alone, at once


def share_of(name: str, num_layers: int) -> float | list[float]:
    """Returns the memory share of an arm's name. Raises `ValueError` for other names."""
    return [1.0] + [0.0] * (num_layers - 1) if name == LOWEST else parse_share(name)


def fields_of(share: str, sink: int | None, config: Any) -> dict[str, Any]:
    """Returns all fields of a folded model's memory, for a model of this configuration; `sink` is a token or None."""
    return {
        "memory_source": "layer_output",
        "memory_share": share_of(share, config.num_hidden_layers),
        "sink_token_id": sink,
        "bptt_segments": None,
    }


def check_arm(config: Any, share: str, sink: int, segment_length: int) -> None:
    """Raises `ValueError` for a model that can't be folded like this."""
    variant_config(config, segment_length=segment_length, **fields_of(share, sink, config))


@torch.no_grad()
def arm_losses(
    stock: Any, memory: str, sink: int | None, ids_N: torch.Tensor, segment_length: int, attention: str = "auto"
) -> torch.Tensor:
    """Returns the losses [N - 1], at least in float32, of tokens 1 to N - 1 of a text; `sink` is the token or None."""
    ids_N = ids_N.to(stock.device)
    if memory == NONE:
        hidden_ND = _alone(stock, ids_N[:-1], segment_length, sink)
    elif memory == WINDOW:
        with attend_to_window(stock, 2 * segment_length, 0 if sink is None else min(WINDOW_SINKS, segment_length)):
            hidden_ND = _read(stock, ids_N[:-1])
    elif memory == FULL:
        hidden_ND = _read(stock, ids_N[:-1])
    else:
        fields = fields_of(memory, sink, stock.config)
        hidden_ND = _read(variant(stock, attention, segment_length=segment_length, **fields), ids_N[:-1])
    return head_losses(stock, hidden_ND, ids_N[1:])


def _read(model: Any, ids_N: torch.Tensor) -> torch.Tensor:
    return model.model(ids_N[None], use_cache=False).last_hidden_state[0]


def _alone(stock: Any, ids_N: torch.Tensor, segment_length: int, sink: int | None) -> torch.Tensor:
    """Returns the final hidden states [N, D] of segments that are read as texts of their own, the sink left out."""
    parts = ids_N.split(segment_length)
    first = ids_N.new_tensor([] if sink is None else [sink])
    rows_SL = pad_sequence([torch.cat([first, part_L]) for part_L in parts], batch_first=True)  # behind the last one
    at_once = max(1, ROW_TOKENS // rows_SL.shape[1])
    read = [stock.model(rows, use_cache=False).last_hidden_state for rows in rows_SL.split(at_once)]
    return torch.cat(read)[:, len(first) :].flatten(0, 1)[: len(ids_N)]
