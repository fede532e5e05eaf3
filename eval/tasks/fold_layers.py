"""Traces of a fold's layers, segment by segment, and changes to what they remember.

A layer's remembered states M are normed before they become keys and values, so their length says nothing, and their
direction everything. A layer whose output draws attention to what gave this output can remember itself: its memory
takes more attention with each segment, until all tokens are alike. `REMEDIES` change what a layer remembers.

Axes: R rows (1), T tokens of a segment, D hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from condense.ops.kernels.rotary import rotate

from .attention_scores import project, scores, visible

LIMIT = 0.1  # of the length of X, for the limited update
PERCENTILE = 0.99  # of the absolute values of X


def rescale(input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
    """Returns Y in the length of X."""
    return output_RTD * (input_RTD.norm(dim=-1, keepdim=True) / output_RTD.norm(dim=-1, keepdim=True))


def limit(input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
    """Returns X + (Y - X), with Y - X shortened to at most a tenth of the length of X."""
    update_RTD = output_RTD - input_RTD
    ratio_RT1 = LIMIT * input_RTD.norm(dim=-1, keepdim=True) / update_RTD.norm(dim=-1, keepdim=True)
    return input_RTD + update_RTD * ratio_RT1.clamp(max=1)


def center(input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
    """Returns Y, less the mean of Y - X over the segment's tokens."""
    return output_RTD - (output_RTD - input_RTD).mean(1, keepdim=True)


def clip(input_RTD: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
    """Returns Y, with each dimension clipped to the 99th percentile of its absolute values in X."""
    most_R1D = input_RTD.abs().quantile(PERCENTILE, dim=1, keepdim=True)
    return output_RTD.maximum(-most_R1D).minimum(most_R1D)


REMEDIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rescaled": rescale,
    "limited": limit,
    "centred": center,
    "clipped": clip,
}


@contextmanager
def remembering(model: Any, remedy: str) -> Iterator[None]:
    """Changes what the layers of a folded model of share 1 remember."""

    def change(_: Any, states: tuple[torch.Tensor, torch.Tensor], __: Any) -> torch.Tensor:
        return REMEDIES[remedy](*states)

    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.callback(layer.memory_share.register_forward_hook(change).remove)
        yield


class Traces:
    """Notes what each layer remembers of each segment, and where its queries look, while a folded model reads one text
    in one call.

    `records` holds one dictionary per layer and segment that is remembered: the median `norm` of the remembered states;
    `alike`, the mean cosine of neighbouring ones; `on_memory`, the share of attention on the memory less its first row,
    and `on_first`, on that row, which is the sink's if there is one. `sink_norms` are the lengths of the layers'
    outputs for the sink. Layers of share 0 are left out.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.sink_norms: list[float] = []
        self._attention: dict[str, float] = {}

    @contextmanager
    def note_readings(self, model: Any) -> Iterator[None]:
        """Notes what the model reads. Remedies come before: their results are noted."""
        with ExitStack() as stack:
            for number, layer in enumerate(model.model.layers):
                stack.callback(layer.register_forward_hook(self._note_sink).remove)
                stack.callback(layer.self_attn.register_forward_pre_hook(self._note_attention).remove)
                stack.callback(layer.memory_share.register_forward_hook(partial(self._note_memory, number)).remove)
            yield

    def _note_sink(self, _: Any, arguments: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        if arguments[2].is_sink:
            self.sink_norms.append(results[0].norm().item())

    def _note_attention(self, attention: Any, arguments: tuple[Any, ...]) -> None:
        hidden_RTD, memory, metadata = arguments
        self._attention = {"segment": metadata.chunk.segments[0], "on_memory": 0.0, "on_first": 0.0}
        if memory is None:
            return
        query_HTE, key_GTE = (rotate(part, metadata.rotary)[0] for part in project(attention, hidden_RTD))
        key_GKE = torch.cat([memory.key_RGKE[0], key_GTE], dim=1)
        num_queries, num_keys = query_HTE.shape[1], key_GKE.shape[1]
        is_visible_TK = visible(num_queries, num_keys).to(key_GKE.device)
        weight_HTK = scores(query_HTE, key_GKE).masked_fill(~is_visible_TK, float("-inf")).softmax(-1)
        weight_K = weight_HTK.mean((0, 1))
        self._attention["on_first"] = weight_K[0].item()
        self._attention["on_memory"] = weight_K[1 : num_keys - num_queries].sum().item()

    def _note_memory(self, number: int, _: Any, __: Any, memory_RTD: torch.Tensor) -> None:
        memory_TD = memory_RTD[0].float()
        alike = F.cosine_similarity(memory_TD[1:], memory_TD[:-1], dim=-1).mean().item()
        norm = memory_TD.norm(dim=-1).median().item()
        self.records.append({"layer": number, **self._attention, "norm": norm, "alike": alike})
