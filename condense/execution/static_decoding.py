"""A new token for every row as one static step: the same kernels on the same buffers at any length of the text.

The device holds the position of each row, and the host counts along without reading it. So the step can be captured
as a CUDA graph, which replaces all kernel launches by one, and compiled without a graph break. The step runs the
layers' own code; only the mask, the positions and the destinations of keys and values are tensors instead of numbers.
Between two steps, the cache rolls the rows whose segment is complete.

    model.fixed_decoding = True  # or "compiled": by torch.compile, which takes up to a minute at the first tokens
    model.generate(...)  # or model(next_ids, cache=cache), without gradients

All other calls (prompts, padding, durations, gradients, autocast) run as usual, in any order with static steps on the
same cache. A graph belongs to one cache and to weights that are not moved. Beam search, which makes new buffers for
every token, and models with hooks run static steps without a graph.

Axes: B rows of a batch, G key/value heads, L segment length, K keys of a buffer [memory L ; current L], E head
dimension, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from ..attention import AttentionMask, AttentionMetadata
from ..attention.metadata import rotary_tables
from ..ops.linear import apply_linear
from ..segmentation import Chunk, SegmentPositions, UnpaddedBatch, on_device
from ..sinks import compute_sinks
from ..state.cache import FoldedCache
from ..state.cache_layer import FoldedCacheLayer
from ..state.memory import Memory
from .cuda_graph import GRAPHS, STATIC_IMPLEMENTATIONS
from .executor import run_layers

FIXED_DECODING = (False, True, "compiled")
# A chunk holds positions as Python numbers, which a graph would record as constants: any use of it must fail.
NO_CHUNK = cast(Chunk, None)

Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StaticAttentionMask(AttentionMask):
    """The keys of the whole buffer that each row's only query sees, as a mask on the device."""

    mask_B11K: torch.Tensor = field(kw_only=True)
    lower_right = False

    def boolean(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        assert num_queries == 1 and num_keys == self.mask_B11K.shape[-1]
        return self.mask_B11K


class StaticKeyValues(NamedTuple):
    """A layer's buffers, written at each row's own key."""

    layer: FoldedCacheLayer
    own_key_B: torch.Tensor

    def extend(self, key_BG1E, value_BG1E, chunk):
        _scatter(self.layer.keys, key_BG1E, self.own_key_B)
        _scatter(self.layer.values, value_BG1E, self.own_key_B)
        return self.layer.keys, self.layer.values

    def memory(self, chunk):
        raise AssertionError("only chunks of whole segments need the memory on its own")

    def at_evaluation(self, number, num_evaluations):
        raise AssertionError("a depth block has no static step")


def _scatter(buffer_BGKE: torch.Tensor, token_BG1E: torch.Tensor, key_B: torch.Tensor) -> None:
    buffer_BGKE.scatter_(2, key_B[:, None, None, None].expand_as(token_BG1E), token_BG1E)


def static_step(
    model: PreTrainedModel,
    layers: Sequence[FoldedCacheLayer],
    ids_B1: torch.Tensor,
    positions_2B: torch.Tensor,
    sinks: Sequence[Memory] | None = None,
) -> Outputs:
    """Returns final hidden states [B, D] and logits [B, 1, V] of one token of each row, without reads by the host.

    `positions_2B`: each row's offset in its segment, and the length of its memory (0 or L). Both advance in place.
    `sinks`: keys and values [1, G, 1, E] of each layer, which take the place of the first token of a segment.
    """
    llama, length = model.model, layers[0].segment_length
    offset_B, memory_length_B = positions_2B
    own_key_B = length + offset_B
    keys_K = torch.arange(2 * length, device=ids_B1.device)
    visible_BK = (keys_K >= (length - memory_length_B)[:, None]) & (keys_K <= own_key_B[:, None])
    metadata = AttentionMetadata(
        chunk=NO_CHUNK,
        rotary=rotary_tables(llama.rotary_emb, llama.norm.weight, (memory_length_B + offset_B)[:, None]),
        memory_rotary=rotary_tables(llama.rotary_emb, llama.norm.weight, offset_B[:, None]),
        mask=StaticAttentionMask(NO_CHUNK, mask_B11K=visible_BK[:, None, None]),
        writes_memory=True,
        detach_R=(False,),
    )
    key_values = [StaticKeyValues(layer, own_key_B) for layer in layers]
    hidden_B1D, memories = run_layers(llama.layers_in_use, llama.embed_tokens(ids_B1), key_values, metadata)
    begins_B111 = (offset_B == 0)[:, None, None, None]
    for number, (layer, memory) in enumerate(zip(layers, memories, strict=True)):
        if memory is not None:
            if sinks is not None:
                pairs = zip(sinks[number], memory, strict=True)
                memory = Memory(*(torch.where(begins_B111, *pair) for pair in pairs))
            _scatter(layer.next_keys, memory.key_RGKE, offset_B)
            _scatter(layer.next_values, memory.value_RGKE, offset_B)
    complete_B = offset_B == length - 1
    memory_length_B.masked_fill_(complete_B, length)
    offset_B.add_(1).masked_fill_(complete_B, 0)
    normed_B1D = llama.norm(hidden_B1D)
    return normed_B1D[:, 0], apply_linear(model.lm_head, normed_B1D)


def fixed_decoding_of(model: Any, cache: FoldedCache) -> bool | str:
    """Returns the setting for calls with this cache: the cache's own, or the model's."""
    return model.fixed_decoding if cache.fixed_decoding is None else cache.fixed_decoding


def can_decode(model: PreTrainedModel, cache: FoldedCache, batch: UnpaddedBatch) -> bool:
    """Returns whether a call is one new token for every row of a text that has begun, without anything else.

    Raises `ValueError` if it is but the model's settings do not allow a static step.
    """
    if model.training or torch.is_grad_enabled() or batch.num_columns != 1 or batch.mask_BN is not None:
        return False
    if cache.timeline is not None or cache.batch_size != batch.batch_size or cache.last_hidden_BD is None:
        return False
    if (kind := fixed_decoding_of(model, cache)) not in FIXED_DECODING:
        raise ValueError(f"fixed_decoding={kind!r}: choose one of {', '.join(map(repr, FIXED_DECODING))}.")
    device, inference = model.device, torch.is_inference_mode_enabled()
    for buffer in _buffers(cache):  # they are written in place
        if buffer.device != device or buffer.requires_grad or (buffer.is_inference() and not inference):
            return False
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return False  # autocast keeps its casts of weights outside of a graph, and only briefly
    check_static_step(model, "fixed_decoding", "set model.fixed_decoding = False")
    return True


def check_static_step(model: Any, asked: str, remedy: str) -> None:
    """Raises `ValueError` for a model that doesn't support static steps; the message names the option in `asked`."""
    if model.config.depth is not None:
        raise ValueError(f"{asked} has no step for a depth block: {remedy}.")
    implementation = model.config._attn_implementation
    if implementation not in STATIC_IMPLEMENTATIONS:
        raise ValueError(
            f"{asked} has no step for attn_implementation={implementation!r}: call "
            f"model.set_attn_implementation('sdpa'), or {remedy}."
        )


def decode(model: PreTrainedModel, cache: FoldedCache, input_ids: torch.Tensor) -> torch.Tensor:
    """Reads one token of every row into a cache; returns logits [B, 1, V]. Only for calls that `can_decode` accepts."""
    step = cache.static_decoding
    if not isinstance(step, StaticDecoding) or not step.fits(model, cache):
        step = cache.static_decoding = StaticDecoding(model, cache)
    cache.begin_call()
    for chunk in cache.positions.chunks([1] * cache.batch_size):  # a single chunk
        if 0 in chunk.offsets:  # the first token of a segment
            step.update_sinks(model)
        hidden_BD, logits_B1V = step.run(model, input_ids, position_lists(cache.positions))
        cache.store_last_hidden(hidden_BD[:, None], chunk)
        cache.roll(chunk)
    step.positions_on_device = position_lists(cache.positions)
    cache.end_call(1)
    return logits_B1V


class StaticDecoding:
    """The tensors that one cache's static steps share and, on CUDA, the graph that was captured with them.

    The first step warms up, the second is captured. If every step has new buffers, as in beam search, none is captured.
    """

    def __init__(self, model: PreTrainedModel, cache: FoldedCache):
        self.layers, self.buffers = cache.layers, _buffers(cache)
        self.arrangement, hooked = _arrangement(model)
        self.kind = fixed_decoding_of(model, cache)
        self.device = model.device
        self.graphs = None if hooked else GRAPHS.get(self.device.type)  # a replay calls no hooks
        with torch.inference_mode(False):  # the tensors may outlive it
            self.ids_B1 = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=self.device)
            self.positions_2B = torch.zeros(2, cache.batch_size, dtype=torch.long, device=self.device)
        self.sinks: list[Memory] | None = None
        self.positions_on_device: list[list[int]] | None = None  # None if unknown
        self.outputs: Outputs | None = None
        self.replay: Callable[[], object] | None = None

    def __reduce__(self):
        return type(None), ()  # copied and stored caches have no graph: a graph is bound to its buffers

    def fits(self, model: PreTrainedModel, cache: FoldedCache) -> bool:
        buffers = _buffers(cache)
        if len(buffers) != len(self.buffers) or self.kind != fixed_decoding_of(model, cache):
            return False
        if any(own is not other for own, other in zip(self.buffers, buffers, strict=True)):
            return False
        return self.replay is None or self.arrangement == _arrangement(model)[0]

    def update_sinks(self, model: PreTrainedModel) -> None:
        """Computes the sinks again, in the same tensors."""
        sinks = compute_sinks(model.model, model.model.norm.weight)
        found = [sink for sink in sinks or () if sink is not None]  # a depth block has no static step
        if not found:
            return
        if self.sinks is None:
            with torch.inference_mode(False):
                self.sinks = [Memory(*map(torch.empty_like, sink)) for sink in found]
        for own, new in zip(self.sinks, found, strict=True):
            for buffer, tensor in zip(own, new, strict=True):
                buffer.copy_(tensor)

    def run(self, model: PreTrainedModel, input_ids: torch.Tensor, positions: list[list[int]]) -> Outputs:
        """Runs a step. `positions` are copied to the device only if other calls have moved the rows."""
        if positions != self.positions_on_device:
            self.positions_2B.copy_(on_device(torch.tensor(positions), self.device))
        self.positions_on_device = None
        self.ids_B1.copy_(input_ids)
        step = _compiled_step() if self.kind == "compiled" else static_step
        if self.sinks is None and model.config.sink_token_id is not None:
            self.update_sinks(model)
        compute = partial(step, model, self.layers, self.ids_B1, self.positions_2B, self.sinks)
        if self.replay is not None:
            self.replay()
        elif self.graphs is None:
            self.outputs = compute()
        elif self.outputs is None:
            self.outputs = self.graphs.warm_up(compute, self.device)
        else:
            self.replay, self.outputs = self.graphs.capture(compute, self.device)
            self.replay()
        assert self.outputs is not None
        hidden_BD, logits_B1V = self.outputs
        return hidden_BD.clone(), logits_B1V.clone()  # the next replay writes over them


@cache
def _compiled_step() -> Callable[..., Outputs]:
    return torch.compile(static_step, dynamic=False)


def _buffers(cache: FoldedCache) -> list[torch.Tensor]:
    return [buffer for layer in cache.layers for buffer in layer.buffers]


def position_lists(positions: SegmentPositions) -> list[list[int]]:
    return [list(positions.offsets), [positions.segment_length if segment else 0 for segment in positions.segments]]


def _arrangement(model: PreTrainedModel) -> tuple[list, bool]:
    """Returns the parts of the model that a graph depends on, its modules and the addresses of their tensors, and
    whether any module has hooks.

    The order is the same as in `model.modules()`, several times as fast, because every token calls this function.
    """
    found: list = [model.config._attn_implementation]
    modules: list[torch.nn.Module] = [model]
    hooked = False
    for module in modules:
        found.append(id(module))
        hooked = hooked or bool(module._forward_hooks or module._forward_pre_hooks)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            found.append(tensor is not None and (id(tensor), tensor.data_ptr(), tensor.dtype))
        modules += [child for child in module._modules.values() if child is not None]
    return [*found, hooked], hooked
