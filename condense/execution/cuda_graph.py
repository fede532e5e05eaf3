"""How computations of static shape are captured as CUDA graphs: new tokens (`static_decoding`) and whole segments
(`segment_steps`)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

STATIC_IMPLEMENTATIONS = ("auto", "sdpa", "blocked", "eager")


class Graphs(NamedTuple):
    """How a device warms up and captures steps; a capture returns a replay and the tensors of its outputs."""

    warm_up: Callable[[Callable[[], Any], torch.device], Any]
    capture: Callable[[Callable[[], Any], torch.device], tuple[Callable[[], object], Any]]


def _warm_up_cuda(compute: Callable[[], Any], device: torch.device) -> Any:
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


def _capture_cuda(compute: Callable[[], Any], device: torch.device) -> tuple[Callable[[], object], Any]:
    """Computes nothing; the replay does."""
    graph = torch.cuda.CUDAGraph()
    # A stream of this device: torch's own one for captures is of the first device that captured. Other threads may
    # allocate meanwhile.
    aside = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        outputs = compute()
    return graph.replay, outputs


GRAPHS = {"cuda": Graphs(_warm_up_cuda, _capture_cuda)}
