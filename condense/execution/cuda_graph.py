"""Captures computations of static shape as CUDA graphs: new tokens (`static_decoding`) and groups of segments
(`captured_groups`)."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

STATIC_IMPLEMENTATIONS = ("auto", "sdpa", "blocked", "eager")


class Pool(NamedTuple):
    """The memory pool and the stream of captures. If a capture keeps no reference to a tensor, a later capture of the
    same pool may overwrite it, because its graphs replay one after the other."""

    handle: Any
    stream: Any


class Graphs(NamedTuple):
    """The warm-up and capture of a device's computations; a capture returns a replay and its output tensors."""

    new_pool: Callable[[torch.device], Pool]
    warm_up: Callable[[Callable[[], Any], torch.device], Any]
    capture: Callable[..., tuple[Callable[[], object], Any]]  # of a computation, a device, and perhaps a pool


def _new_pool_cuda(device: torch.device) -> Pool:
    with torch.cuda.device(device):
        return Pool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def _warm_up_cuda(compute: Callable[[], Any], device: torch.device) -> Any:
    """Runs on a side stream, as a capture will."""
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            outputs = compute()
        here.wait_stream(aside)
        for tensor in outputs:
            tensor.record_stream(here)
    return outputs


def _capture_cuda(
    compute: Callable[[], Any], device: torch.device, pool: Pool | None = None
) -> tuple[Callable[[], object], Any]:
    """Captures without computing; the replay computes.

    Unreferenced graphs are destroyed first, because a collection during the capture would abort it.
    """
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    # A stream of this device: torch's own stream for captures belongs to the first device that captured. Other threads
    # may allocate meanwhile.
    handle, aside = pool or (None, torch.cuda.Stream(device))
    capturing = torch.cuda.graph(graph, pool=handle, stream=aside, capture_error_mode="thread_local")
    with torch.cuda.device(device), _without_collections(), capturing:
        outputs = compute()
    return graph.replay, outputs


@contextmanager
def _without_collections() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


GRAPHS = {"cuda": Graphs(_new_pool_cuda, _warm_up_cuda, _capture_cuda)}
