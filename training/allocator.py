"""The CUDA allocator: counters, and a snapshot when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_EVENTS = 100_000  # the last ones that a history keeps; without a limit it would grow with the run
VIEWER = "https://pytorch.org/memory_viz"


def cuda_memory() -> dict[str, int]:
    """Returns this process's peak bytes in tensors, peak bytes reserved, and how often the allocator ran out.

    Each time it ran out, it freed its reserve and tried again, which costs time.
    """
    return {
        "peak_cuda_bytes": torch.cuda.max_memory_allocated(),
        "reserved_cuda_bytes": torch.cuda.max_memory_reserved(),
        "cuda_allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def record_history() -> None:
    """Adds the latest allocations to later snapshots, each with the Python lines that made it."""
    if not torch.cuda.is_available():
        print("no GPU: no history of its memory is recorded", flush=True)
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")


def write_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


@contextmanager
def snapshot_when_full(path: Path, remedy: str) -> Iterator[None]:
    """Writes a snapshot to `path` when the GPU's memory runs out.

    Raises `torch.OutOfMemoryError` with a one-sentence message: torch's cause, `remedy`, and the file.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            write_snapshot(path)
            snapshot = f"a snapshot is in {path}; open it at {VIEWER}"
        except (OSError, RuntimeError) as failure:
            snapshot = f"the snapshot could not be written to {path}: {failure}"
        cause = str(error).split(". ")[0]
        raise torch.OutOfMemoryError(f"the GPU's memory is full ({cause}): {remedy}; {snapshot}.") from error
