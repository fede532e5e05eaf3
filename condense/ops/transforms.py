"""The ways in which torch changes a computation: transformations of its operations, autocast, and hooks."""

from collections.abc import Collection
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

Kind = TypeVar("Kind", bound=nn.Module)


def is_transformed() -> bool:
    """Returns whether torch.compile, torch.func or forward derivatives are active. A computation must then consist of
    operations that torch knows."""
    return torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_in_torch_func()


def is_in_torch_func() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast computes products in on a device; None if it is off."""
    active = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if active else None


def hidden_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of hidden states, which are sums of embeddings in the given dtype and of products: float32 for
    float16 beside autocast's bfloat16, and the reverse."""
    cast = autocast_dtype(device)
    return dtype if cast is None else torch.promote_types(dtype, cast)


def join(tensors: tuple[torch.Tensor, ...] | list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Works as `torch.cat`, which autocast refuses for tensors in the half precision that is not its own."""
    device = tensors[0].device
    if autocast_dtype(device) is None:
        return torch.cat(tensors, dim)
    with torch.autocast(device.type, enabled=False):
        return torch.cat(tensors, dim)


def has_hooks(module: nn.Module, besides: Collection[str] = ()) -> bool:
    """Returns whether a module has hooks, besides those of some names."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if not besides:
        return any(hooks)
    return any(getattr(hook, "__name__", None) not in besides for one in hooks for hook in one.values())


def is_plain(module: Any, kind: type[Kind], besides: Collection[str] = ()) -> TypeGuard[Kind]:
    """Returns whether a call of the module is nothing but `kind.forward`: not another module in its place, such as an
    adapter, without hooks on it (`besides` those of some names) or on all modules, without a forward of its own
    (accelerate's) or compiled code."""
    if type(module) is not kind or has_hooks(module, besides) or _has_any_global_hook():
        return False
    return "forward" not in module.__dict__ and module._compiled_call_impl is None
