"""Peak memory of the CUDA allocator on a GPU, and of the process (resident memory) on a CPU."""

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from condense.training.allocator import cuda_memory


class CudaMemory:
    """Measures the bytes in use `now`, and their `peak` since the last `restart`.

    `allocator` returns the most bytes that the allocator has reserved, and how often they ran out.
    """

    description = "peak of the CUDA allocator"

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def allocator(self) -> dict[str, int]:
        found = cuda_memory()
        retries = found["cuda_allocation_retries"]
        return {"reserved_bytes": found["reserved_cuda_bytes"], "allocation_retries": retries}


class ResidentMemory:
    """Measures the same without an allocator. Linux lets a process reset its peak; other systems raise `OSError`.

    What the process has freed does not count: glibc, which may keep it, is made to return it first.
    """

    description = "peak resident memory of the process"

    def _read(self, path: str, name: str) -> int:
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise OSError(f"{path} has no {name}: memory can be measured on Linux only.")

    def __init__(self) -> None:
        # The system then refuses an allocation that does not fit, instead of swapping or killing the process.
        available = self._read("/proc/meminfo", "MemAvailable:")
        resource.setrlimit(resource.RLIMIT_DATA, (self._read("/proc/self/status", "VmData") + available, -1))

    def now(self) -> int:
        _return_freed_memory()
        return self._read("/proc/self/status", "VmRSS")

    def restart(self) -> None:
        _return_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return self._read("/proc/self/status", "VmHWM")

    def allocator(self) -> dict[str, int]:
        return {}


def _return_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


PeakMemory = CudaMemory | ResidentMemory


def memory_of(device: str) -> PeakMemory:
    return CudaMemory() if device == "cuda" else ResidentMemory()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory; the CPU's allocator raises an ordinary `RuntimeError`."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def or_out_of_memory(figures: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures with a measurement's added, or with `out_of_memory` if it does not fit."""
    try:
        return figures | measure()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return figures | {"out_of_memory": True}
