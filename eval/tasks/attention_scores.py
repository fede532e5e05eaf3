"""Attention scores of a layer before softmax, without changing the model.

Forward hooks recompute queries and keys from the input of a layer's attention, with its own projections and rotary
tables, while the model reads a text as usual.

Axes: H query heads, G key/value heads, T queries (the tokens of a segment), K keys, k the last 2T of them,
E head dimension, D hidden size, N tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from condense import CondenseForCausalLM
from condense.hub.transformers_private import apply_rotary_pos_emb
from condense.ops.kernels.rotary import rotate

CELLS = 128  # of a map, along a segment; longer segments are averaged in blocks


@torch.no_grad()
def queries_and_keys(
    model: Any, ids_N: torch.Tensor, segment_length: int, layers: Sequence[int], segments: Sequence[int]
) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Returns by (layer, segment) the segment's queries [H, T, E] and all keys [G, K, E] that its last query sees.

    Both are rotated. The last 2T keys belong to the segment before and the segment itself.
    """
    folded, found = isinstance(model, CondenseForCausalLM), {}

    def note(layer: int, module: Any, arguments: tuple, named: dict[str, Any]) -> None:
        if folded:
            hidden_1TD, memory, metadata = arguments
            segment = metadata.chunk.segments[0]
            if segment in segments:
                query_1HTE, key_1GTE = (rotate(part, metadata.rotary) for part in project(module, hidden_1TD))
                found[layer, segment] = query_1HTE[0], torch.cat([memory.key_RGKE, key_1GTE], dim=2)[0]
            return
        projected = project(module, named["hidden_states"])
        query_1HNE, key_1GNE = apply_rotary_pos_emb(*projected, *named["position_embeddings"])
        for segment in segments:
            first, end = segment * segment_length, (segment + 1) * segment_length
            found[layer, segment] = query_1HNE[0, :, first:end], key_1GNE[0, :, :end]

    modules = [model.model.layers[layer].self_attn for layer in layers]
    handles = [
        module.register_forward_pre_hook(partial(note, layer), with_kwargs=True)
        for layer, module in zip(layers, modules, strict=True)
    ]
    try:
        model(ids_N[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return found


def project(module: Any, hidden_1TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns queries [1, H, T, E] and keys [1, G, T, E], not rotated."""

    def project(name: str) -> torch.Tensor:
        heads_1TxE = getattr(module, f"{name}_proj")(hidden_1TD).unflatten(-1, (-1, module.head_dim))
        norm = getattr(module, f"{name}_norm", None)  # in some families
        return (heads_1TxE if norm is None else norm(heads_1TxE)).transpose(1, 2)

    return project("q"), project("k")


def scores(query_HTE: torch.Tensor, key_GKE: torch.Tensor) -> torch.Tensor:
    """Returns q.k / sqrt(E) before the mask and the softmax: [H, T, K], at least in float32."""
    accurate = torch.promote_types(query_HTE.dtype, torch.float32)
    key_HKE = key_GKE.repeat_interleave(len(query_HTE) // len(key_GKE), dim=0)
    return query_HTE.to(accurate) @ key_HKE.to(accurate).mT * query_HTE.shape[-1] ** -0.5


def visible(num_queries: int, num_keys: int) -> torch.Tensor:
    """Returns the mask [T, K]: each query sees its own key and all keys before it."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def mass(score_HTK: torch.Tensor, has_sink: bool = False) -> dict[str, Any]:
    """Returns the shares of attention on the first key, on the segment before and on earlier ones: see
    `AttentionMaps.measure`. A sink is the first key, in place of a token of the segment before."""
    length, num_keys = score_HTK.shape[1:]
    visible_TK, first = visible(length, num_keys).to(score_HTK.device), num_keys - 2 * length
    weight_HTK = score_HTK.masked_fill(~visible_TK, float("-inf")).softmax(-1)
    previous_HT = weight_HTK[:, :, first + has_sink : first + length].sum(-1)
    return {
        "on_first": weight_HTK[:, :, 0].mean().item(),
        "on_previous": previous_HT.mean().item(),
        "on_earlier": weight_HTK[:, :, :first].sum(-1).mean().item(),
        "by_head": previous_HT.mean(1).tolist(),
        "by_position": previous_HT.mean(0).tolist(),
        "uniform": ((length - has_sink) / visible_TK.sum(1)).tolist(),
    }


def scaled_map(score_Tk: torch.Tensor, has_sink: bool = False) -> dict[str, Any]:
    """Scales scores [T, 2T] to 0 ... 1 over visible keys and averages them in blocks; hidden ones are None.

    With a sink, `sink` [T] is its column, and there is None in its place, where a token of the segment before is
    hidden."""
    length, nan = len(score_Tk), float("nan")
    visible_Tk = visible(length, 2 * length).to(score_Tk.device)
    low, high = score_Tk[visible_Tk].aminmax()
    spread = (high - low).clamp(min=torch.finfo(score_Tk.dtype).tiny)
    scaled_Tk = ((score_Tk - low) / spread).masked_fill(~visible_Tk, nan)
    block = -(-length // CELLS)
    rest = -length % block  # pads each half separately, so no block crosses the border
    found: dict[str, Any] = {"block": block}
    if has_sink:
        padded_T = F.pad(scaled_Tk[:, 0], (0, rest), value=nan)
        found["sink"] = [round(value, 4) for value in padded_T.unflatten(0, (-1, block)).nanmean(1).tolist()]
        scaled_Tk[:, 0] = nan
    padded = F.pad(scaled_Tk.unflatten(1, (2, length)), (0, rest, 0, 0, 0, rest), value=nan)
    cells = padded.unflatten(2, (-1, block)).unflatten(0, (-1, block)).nanmean((1, 4)).flatten(1).tolist()
    return found | {"scores": [[None if value != value else round(value, 4) for value in row] for row in cells]}
