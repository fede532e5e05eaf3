"""A new token for every row by the same kernels on the same buffers, whatever has been read before.

Where the rows stand is held on the device, and the host counts along without looking. So the step can be
captured as a CUDA graph, which spares the host all launches but one, and compiled without a break. What the
step computes is the layers' own code; only what they see and where they write is said in tensors. Rows
whose segment is complete are rolled over between two steps, by the cache.

    model.fixed_decoding = True
    model.generate(...)  # or model(next_ids, past_key_values=cache), without gradients

Calls that are no such step (prompts, padding, durations, gradients, autocast) run as ever, in any order with
the others on one cache. A graph belongs to one cache and to weights that stay where they are. Beam search,
which makes new buffers for every token, and models with hooks run these steps without one.

Axes: B rows, G key/value heads, L segment length, K keys of a buffer [memory L ; current L], E head width,
D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import torch
from transformers import PreTrainedModel

from ..attention import Visibility
from ..cache import FoldedCache, FoldedCacheLayer
from ..layers import Step
from ..segmentation import Alignment, Cursor, Piece, on_device

IMPLEMENTATIONS = ("auto", "sdpa", "blocked", "eager")
UNFIT_ROTARIES = ("dynamic", "longrope")  # their tables depend on which positions are asked for
# A piece tells places as numbers, which a graph would keep for ever: what asks for one here shall fail.
NO_PIECE = cast(Piece, None)

Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PlacedVisibility(Visibility):
    """What each row's only query may see of a whole buffer, as a mask on the device."""

    mask_B11K: torch.Tensor = field(kw_only=True)
    lower_right = False

    def mask(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        assert num_queries == 1 and num_keys == self.mask_B11K.shape[-1]
        return self.mask_B11K


class PlacedPast(NamedTuple):
    """A layer's buffers, written where each row stands."""

    layer: FoldedCacheLayer
    own_key_B: torch.Tensor

    def extend(self, key_BG1E, value_BG1E, piece):
        _put(self.layer.keys, key_BG1E, self.own_key_B)
        _put(self.layer.values, value_BG1E, self.own_key_B)
        return self.layer.keys, self.layer.values

    def memory(self, piece):
        raise AssertionError("only whole segments ask for the memory apart from the keys")


def _put(buffer_BGKE: torch.Tensor, token_BG1E: torch.Tensor, place_B: torch.Tensor) -> None:
    buffer_BGKE.scatter_(2, place_B[:, None, None, None].expand_as(token_BG1E), token_BG1E)


def decode_step(
    model: PreTrainedModel, layers: Sequence[FoldedCacheLayer], ids_B1: torch.Tensor, places_2B: torch.Tensor
) -> Outputs:
    """Final hidden states [B, D] and logits [B, 1, V] of one token a row; nothing here is read by the host.

    `places_2B`: tokens in each row's segment, and keys of its memory (0 or L). Both move on in place.
    """
    llama, length = model.model, layers[0].segment_length
    place_B, memory_B = places_2B
    own_key_B = length + place_B
    keys_K = torch.arange(2 * length, device=ids_B1.device)
    visible_BK = (keys_K >= (length - memory_B)[:, None]) & (keys_K <= own_key_B[:, None])
    step = Step(
        piece=NO_PIECE,
        rotary=llama.rotary_emb(llama.norm.weight, (memory_B + place_B)[:, None]),
        memory_rotary=llama.rotary_emb(llama.norm.weight, place_B[:, None]),
        visibility=PlacedVisibility(NO_PIECE, mask_B11K=visible_BK[:, None, None]),
        remembers=True,
        cut_R=(False,),
    )
    hidden_B1D = llama.embed_tokens(ids_B1)
    for decoder_layer, layer in zip(llama.layers, layers, strict=True):
        hidden_B1D, memory = decoder_layer(hidden_B1D, PlacedPast(layer, own_key_B), step)
        _put(layer.next_keys, memory.key_RGKE, place_B)
        _put(layer.next_values, memory.value_RGKE, place_B)
    complete_B = place_B == length - 1
    memory_B.masked_fill_(complete_B, length)
    place_B.add_(1).masked_fill_(complete_B, 0)
    normed_B1D = llama.norm(hidden_B1D)
    return normed_B1D[:, 0], model.lm_head(normed_B1D)


def can_decode(model: PreTrainedModel, cache: FoldedCache, alignment: Alignment) -> bool:
    """Whether a call is one new token for every row of a text that has begun, and nothing else is asked of it.

    Raises `ValueError` where it is and the model's settings forbid such a step.
    """
    if model.training or torch.is_grad_enabled() or alignment.num_columns != 1 or alignment.mask_BN is not None:
        return False
    if cache.timeline is not None or cache.batch_size != alignment.batch_size:
        return False
    if not all(layer.is_initialized for layer in cache.layers):
        return False
    device, inference = model.device, torch.is_inference_mode_enabled()
    for buffer in _buffers(cache):  # they are written in place
        if buffer.device != device or buffer.requires_grad or (buffer.is_inference() and not inference):
            return False
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return False  # casts of weights are kept outside of a graph, and not for long
    implementation, rotary = model.config._attn_implementation, model.model.rotary_emb.rope_type
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"fixed_decoding has no step for attn_implementation={implementation!r}: call "
            "model.set_attn_implementation('sdpa'), or set model.fixed_decoding = False."
        )
    if rotary in UNFIT_ROTARIES:
        raise ValueError(
            f"fixed_decoding needs rotary tables that are always the same, and rope_type={rotary!r} has others for "
            "other lengths: set model.fixed_decoding = False."
        )
    return True


def decode(model: PreTrainedModel, cache: FoldedCache, input_ids: torch.Tensor) -> torch.Tensor:
    """Reads one token of every row into a cache; logits [B, 1, V]. For calls of which `can_decode` holds."""
    step = cache.fixed_step
    if not isinstance(step, FixedStep) or not step.fits(model, cache):
        step = cache.fixed_step = FixedStep(model, cache)
    cache.begin_call()
    for piece in cache.cursor.pieces([1] * cache.batch_size):  # it is one
        cache.last_hidden_BD, logits_B1V = step.run(model, input_ids, _places(cache.cursor))
        if piece.completed:
            for layer in cache.layers:
                layer.roll(piece)
    step.places_on_host = _places(cache.cursor)
    cache.end_call(1)
    return logits_B1V


class FixedStep:
    """The tensors that one cache's steps share and, on CUDA, the graph that was captured on them.

    The first step warms up, the second is captured: where each has buffers of its own, as in beam search, none is.
    """

    def __init__(self, model: PreTrainedModel, cache: FoldedCache):
        self.layers, self.buffers = cache.layers, _buffers(cache)
        self.arrangement, hooked = _arrangement(model)
        self.device = self.buffers[0].device
        self.graphs = None if hooked else GRAPHS.get(self.device.type)  # a replay calls no hooks
        with torch.inference_mode(False):  # the tensors may outlive it
            self.ids_B1 = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=self.device)
            self.places_2B = torch.zeros(2, cache.batch_size, dtype=torch.long, device=self.device)
        self.places_on_host: list[list[int]] | None = None  # what the device holds, where that is known
        self.outputs: Outputs | None = None
        self.replay: Callable[[], object] | None = None

    def __reduce__(self):
        return type(None), ()  # copied and stored caches go on without: a graph is bound to its buffers

    def fits(self, model: PreTrainedModel, cache: FoldedCache) -> bool:
        if any(ours is not theirs for ours, theirs in zip(self.buffers, _buffers(cache), strict=True)):
            return False
        return self.replay is None or self.arrangement == _arrangement(model)[0]

    def run(self, model: PreTrainedModel, input_ids: torch.Tensor, places: list[list[int]]) -> Outputs:
        """`places` are copied to the device only where other calls have moved the rows."""
        if places != self.places_on_host:
            self.places_2B.copy_(on_device(torch.tensor(places), self.device))
        self.places_on_host = None
        self.ids_B1.copy_(input_ids)
        compute = partial(decode_step, model, self.layers, self.ids_B1, self.places_2B)
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


def _buffers(cache: FoldedCache) -> list[torch.Tensor]:
    names = ("keys", "values", "next_keys", "next_values")
    return [getattr(layer, name) for layer in cache.layers for name in names]


def _places(cursor: Cursor) -> list[list[int]]:
    return [list(cursor.filled), [cursor.segment_length if count else 0 for count in cursor.segments]]


def _arrangement(model: PreTrainedModel) -> tuple[list, bool]:
    """What a graph has kept of the model, its modules and where their tensors lie; and whether any has hooks.

    As `model.modules()` would give it, several times as fast: it is asked for at every token.
    """
    found: list = [model.config._attn_implementation]
    modules: list[torch.nn.Module] = [model]
    hooked = False
    for module in modules:
        found.append(id(module))
        hooked = hooked or bool(module._forward_hooks or module._forward_pre_hooks)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            found.append(tensor is not None and (tensor.data_ptr(), tensor.dtype))
        modules += [child for child in module._modules.values() if child is not None]
    return [*found, hooked], hooked


class Graphs(NamedTuple):
    """How steps are warmed up and captured: a capture gives a replay, and where its outputs will lie."""

    warm_up: Callable[[Callable[[], Outputs], torch.device], Outputs]
    capture: Callable[[Callable[[], Outputs], torch.device], tuple[Callable[[], object], Outputs]]


def _warm_up_cuda(compute: Callable[[], Outputs], device: torch.device) -> Outputs:
    """On a side stream, as a capture will be."""
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            outputs = compute()
        here.wait_stream(aside)
        for tensor in outputs:
            tensor.record_stream(here)
    return outputs


def _capture_cuda(compute: Callable[[], Outputs], device: torch.device) -> tuple[Callable[[], object], Outputs]:
    """Computes nothing; the replay does."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        outputs = compute()
    return graph.replay, outputs


GRAPHS = {"cuda": Graphs(_warm_up_cuda, _capture_cuda)}
