"""The state that any causal language model of transformers keeps between two calls.

Attention keeps keys and values. Recurrent models keep states and the last inputs of their convolutions.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from condense.state.cache_argument import CACHE

STATES = (CACHE, "cache_params", "state")  # of a call's output; the next call takes it under the same name


def state_of(output: Any) -> dict[str, Any]:
    """Returns the state in a call's output, as the argument of the next call; empty if the model returns none."""
    return next(({name: output[name]} for name in STATES if output.get(name) is not None), {})


def state_bytes(state: Any) -> int:
    """Returns the bytes of all tensors in a state, such as a cache. Skips single numbers: sizes and counters.

    Shared storage is counted once.
    """
    held: dict[int, dict[tuple[int, int], int]] = {}  # by storage: views of it
    capacity: dict[int, int] = {}
    for tensor in (tensor for tensor in _tensors(state, set()) if tensor.dim()):
        storage = tensor.untyped_storage()
        held.setdefault(storage.data_ptr(), {})[int(tensor.storage_offset()), tensor.nbytes] = tensor.nbytes
        capacity[storage.data_ptr()] = storage.nbytes()
    return sum(min(sum(views.values()), capacity[place]) for place, views in held.items())


def _tensors(part: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yields the tensors in an object's fields and items, at any depth, except in models that a cache refers to."""
    if id(part) in seen or isinstance(part, torch.nn.Module | type):
        return
    seen.add(id(part))
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, Mapping):
        for item in part.values():
            yield from _tensors(item, seen)
    elif isinstance(part, list | tuple | set):
        for item in part:
            yield from _tensors(item, seen)
    else:
        for item in _fields(part):
            yield from _tensors(item, seen)


def _fields(part: Any) -> Iterator[Any]:
    yield from getattr(part, "__dict__", {}).values()
    for owner in type(part).__mro__:
        slots = getattr(owner, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(part, name, None)
