"""Reads a model's weights, wherever they are and whatever they consist of."""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def weights_fingerprint(model: Any) -> str:
    """Returns the hash of the weights, which tells a model from one that was trained further in the same folder."""
    digest, tied = hashlib.sha256(), getattr(model, "all_tied_weights_keys", {})
    for prefix, module in model.named_modules():
        with _weights_of(module):
            for name, parameter in module.named_parameters(recurse=False):
                if f"{prefix}.{name}" not in tied:
                    for tensor in inner_tensors(parameter.detach()):
                        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def spread_values(weight: torch.Tensor, number: int) -> torch.Tensor:
    """Returns `number` values of a weight in its dtype, evenly spread from the first to the last."""
    where = torch.arange(number, device=weight.device) * (weight.numel() - 1) // max(1, number - 1)
    return weight.reshape(-1)[where]


def _weights_of(module: Any) -> Any:
    """Returns a context in which a module's weights can be read, even if a device map keeps them elsewhere."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module, torch.device("cpu"))


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors that a quantized or sharded weight consists of, which may not have all operations itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(tensor, name))
