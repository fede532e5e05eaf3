"""Lets the meta device stand in for a GPU or a CPU: the model runs there as it would on the other device.

It takes the same operations, schedules and captured graphs, which decide what is in memory, and computes nothing:
kernels are not launched, and a captured graph is not replayed. Attention is that of torch's own kernels, which keep no
scores, except `eager`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers.masking_utils

from condense import loss, loss_gradient
from condense.attention import sdpa
from condense.execution import band, cuda_graph, graph, selection, stacked_parameters
from condense.execution.captured_groups import CapturedGroups
from condense.ops.kernels import attention_inputs, cross_entropy, rms_norm, rotary, swiglu
from condense.ops.kernels.availability import DTYPES, has_triton

from .. import distillation
from .allocations import CAPTURED, HOST, Allocations

# Of a stream's products: peaks with it (docs/results/gpu/h100/peers.json) are 64 MiB above those without it (gpu.json).
WORKSPACE = 64 * 2**20
STREAMS = 32  # torch's, in turn; one is in use
KERNELS = attention_inputs, band, cross_entropy, rms_norm, rotary, swiglu


@contextmanager
def standing_in_for(device: str, allocations: Allocations, captures: bool, gathers: bool = False) -> Iterator[None]:
    """Makes models on the meta device run as on `device`, "cuda" or "cpu".

    `captures`: with graphs, if on a GPU. `gathers`: under ZeRO-3, where DeepSpeed has a linear map of its own.
    """
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        def label(owner: Any, name: str, phase: str) -> None:
            replace(owner, name, allocations.during(phase)(getattr(owner, name)))

        label(loss.LossAccumulator, "take_block", "loss")
        label(distillation, "token_losses", "loss")
        replace(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
        replace(torch.autograd.graph, "save_on_cpu", partial(_offload, allocations))
        if gathers:
            replace(F, "linear", partial(F.linear))
        if device == "cpu":
            replace(F, "scaled_dot_product_attention", _cpu_attention)
            replace(sdpa, "_visible_keys", lambda query, num_keys, mask: mask.additive(query.shape[2], num_keys, query))
            replace(loss_gradient, "part_tokens", _with_cpu(loss_gradient.part_tokens, 2))
            replace(selection, "reason_for_sequential", _with_cpu(selection.reason_for_sequential, 3))
        else:
            # CUDA's kernel multiplies the gradient and the softmax first.
            allocations.within[torch.ops.aten._softmax_backward_data.default] = lambda gradient: gradient.nbytes
            replace(F, "scaled_dot_product_attention", _gpu_attention)
            replace(sdpa, "_visible_keys", lambda query, num_keys, mask: None)  # a kernel needs no mask
            replace(stacked_parameters, "JOINING_DEVICES", ("meta",))
            if has_triton():
                from triton.runtime.jit import KernelInterface

                replace(KernelInterface, "__getitem__", lambda kernel, grid: lambda *arguments, **options: None)
                for module in KERNELS:
                    replace(module, "uses_kernels", _uses_kernels)
        if device != "cpu" and captures:
            replace(selection, "CAPTURING_DEVICES", ("meta",))
            replace(graph, "is_in_torch_dispatch_mode", lambda: False)
            label(CapturedGroups, "_capture", "graphs")
            stack.enter_context(mock.patch.dict(cuda_graph.GRAPHS, {"meta": _graphs(allocations)}))
        yield


def has_captured(layers: torch.nn.Module) -> bool:
    """Returns whether groups of these layers run as graphs, from the second use of a shape on."""
    return "_captured_groups" in layers.__dict__


def _with_cpu(function: Callable, place: int) -> Callable:
    """Gives a function "cpu" as its argument number `place`."""
    return lambda *arguments: function(*arguments[:place], "cpu", *arguments[place + 1 :])


def _uses_kernels(tensor: torch.Tensor) -> bool:
    return tensor.dtype in DTYPES["cuda"] and tensor.numel() > 0


def _gpu_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, dropout_p, True, False, scale=scale)[0]


def _cpu_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _offload(allocations: Allocations, **_: Any) -> Any:
    """Works as `save_on_cpu`: saved tensors wait on the host, and new ones are made when they are needed."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with allocations.during(HOST):
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return torch.autograd.graph.saved_tensors_hooks(pack, torch.empty_like)


def _graphs(allocations: Allocations) -> cuda_graph.Graphs:
    """Returns captures that only allocate. They and each of their warm-ups have streams of their own."""
    free_streams = iter(range(STREAMS - 1))

    def new_pool(device: torch.device) -> cuda_graph.Pool:
        if next(free_streams, None) is not None:
            allocations.hold("graphs", WORKSPACE)
        return cuda_graph.Pool(None, None)

    def warm_up(compute: Callable[[], Any], device: torch.device) -> Any:
        """Computes at a moment of its own: without memory for it, the group runs without a graph."""
        new_pool(device)
        moment = allocations.moment
        allocations.begin("warm-up")
        try:
            return compute()
        finally:
            allocations.begin(moment)

    def capture(compute: Callable[[], Any], device: torch.device, pool: Any = None) -> tuple[Callable[[], object], Any]:
        with allocations.during(CAPTURED):
            return lambda: None, compute()

    return cuda_graph.Graphs(new_pool, warm_up, capture)
