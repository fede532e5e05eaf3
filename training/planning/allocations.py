"""Counts the memory of a computation on the meta device, where tensors have sizes and lifetimes but no numbers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUNDING = {"cuda": 512, "cpu": 64}  # bytes of torch's allocators
HEAP_BLOCK = 32 * 2**20  # glibc takes larger blocks from the system one by one, and returns them
HOST, CAPTURED = "host", "captured"


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors by the phase that makes them, while they are alive.

    `most` has the bytes by phase when they were most on the device, for each moment of a step, and `begun` those at its
    beginning. Tensors of the phase "captured" belong to the memory of graphs, which only grows.
    `held_share` is the share of a freed heap block that stays with the process. `within` has the bytes that operations
    need besides their results, by the operation, from its first argument.
    """

    def __init__(self, device: str, held_share: float = 0.0):
        super().__init__()
        self.rounding, self.held_share = ROUNDING[device], held_share
        self.within: dict[Any, Callable[[Any], int]] = {}
        self.phase, self.moment = "activations", "forward"
        self.alive: Counter[str] = Counter()
        self.begun: dict[str, Counter[str]] = {}
        self.most: dict[str, Counter[str]] = {}
        self._captured = 0  # alive in that memory
        self._storages: dict[int, Any] = {}  # tensors with a storage in common count once

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler runs here, and keeping it away from each operation takes longer than to count it

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def begin(self, moment: str) -> None:
        self.moment, self.begun[moment] = moment, self.alive.copy()
        self.hold(self.phase, 0)  # what is alive already may be the most

    def hold(self, phase: str, size: int) -> None:
        """Adds bytes, or with a negative size takes them away."""
        self.alive[phase] += size
        if size >= 0 and on_device(self.alive) >= on_device(self.most.get(self.moment, {})):
            self.most[self.moment] = self.alive.copy()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # a number that the host reads, or True
        selected = _select(*args) if function is torch.ops.aten.index.Tensor else None
        result = function(*args, **(kwargs or {})) if selected is None else selected
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._count(tensor.untyped_storage())
        if function in self.within:
            size = self.within[function](args[0])
            self.hold(self.phase, size)
            self.hold(self.phase, -size)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, ceil(storage.nbytes() / self.rounding) * self.rounding
        if key in self._storages or not size:
            return
        phase, held = self.phase, int(size * self.held_share) if size < HEAP_BLOCK else 0

        def free(_: Any) -> None:
            del self._storages[key]
            self._allocate(phase, -size, -held)

        self._storages[key] = ref(storage, free)
        self._allocate(phase, size, held)

    def _allocate(self, phase: str, size: int, held: int) -> None:
        if phase == CAPTURED:
            self._captured += size
            size, held = max(0, self._captured - self.alive[CAPTURED]), 0
        if held:
            self.hold("heap", held)
        self.hold(phase, size)


def on_device(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values()) - sizes.get(HOST, 0)


def _select(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Selects by a mask on the meta device, whose values nobody knows: all that it could select."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or not mask.is_meta:
        return None
    return tensor.flatten(0, mask.dim() - 1).clone()
