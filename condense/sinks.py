"""The attention sink: a token's keys and values, alone at the beginning of a text, in place of each memory's first row.

Pretrained models park attention on a text's first token, which has left the memory after the first segment. A token at
position 0 sees only itself, so its keys and values depend on the weights alone.

Axes: D hidden size, G key/value heads, E head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .attention.metadata import AttentionMetadata, AttentionMetadataBuilder
from .configuration import CondenseConfig
from .control import zero_control
from .execution.executor import run_layers
from .segmentation import SegmentPositions, UnpaddedBatch
from .state.memory import Memory, TransientState
from .token_inputs import TokenInputs


def compute_sinks(model: Any, like: torch.Tensor) -> list[Memory | None] | None:
    """Returns the keys and values [1, G, 1, E] of the sink in each layer in use of a `CondenseModel`; None without a
    sink. They are part of the autograd graph. `like` gives device and dtype of hidden states. Raises `ValueError` for a
    model without an embedding."""
    config: CondenseConfig = model.config
    if config.sink_token_id is None:
        return None
    if (embedding := getattr(model, "embed_tokens", None)) is None:
        raise ValueError(
            f"sink_token_id={config.sink_token_id} and the model has no embedding for it: keep embed_tokens, or set "
            "model.config.sink_token_id=None."
        )
    ids_11 = torch.full((1, 1), config.sink_token_id, device=like.device)
    with _in_evaluation(embedding):  # noise on embeddings, as NEFTune's, is for texts
        hidden_11D = embedding(ids_11)
    batch, state = UnpaddedBatch(1, 1, None), TransientState.empty(1, config)
    control = zero_control(config.control_size, ids_11, like) if config.control_size else None
    inputs = TokenInputs(batch, like.device, control=control)
    builder = AttentionMetadataBuilder(model.rotary_emb, like, batch, state, inputs, None, has_cache=True)
    (chunk,) = SegmentPositions(1, config.segment_length).chunks([1])
    metadata: AttentionMetadata = builder.build(chunk, is_sink=True)
    return run_layers(model.layers_in_use, hidden_11D, [None] * len(model.layers_in_use), metadata)[1]


def begins_memory(positions: SegmentPositions, lengths: list[int], has_cache: bool) -> bool:
    """Returns whether a call of `lengths[b]` further tokens writes the first row of a memory that is read later."""
    if not has_cache and positions.is_one_chunk(lengths):
        return False
    length = positions.segment_length
    ends = zip(positions.offsets, lengths, strict=True)
    return any(count and (offset == 0 or offset + count > length) for offset, count in ends)


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    training, module.training = module.training, False
    try:
        yield
    finally:
        module.training = training
