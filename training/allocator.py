"""What the CUDA allocator holds: its figures, and a snapshot of it when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_EVENTS = 100_000  # the last ones that a history keeps; without a limit it would grow with the run
VIEWER = "https://pytorch.org/memory_viz"


def cuda_memory() -> dict[str, int]:
    """Of this process so far: the most bytes in tensors, the most reserved for them, and how often these ran out.

    Each time, the allocator freed what it held in reserve and tried again, which costs time.
    """
    return {
        "peak_cuda_bytes": torch.cuda.max_memory_allocated(),
        "reserved_cuda_bytes": torch.cuda.max_memory_reserved(),
        "cuda_allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def record_history() -> None:
    """Gives later snapshots the last allocations, each with the Python lines that made it."""
    if not torch.cuda.is_available():
        print("no GPU: no history of its memory is recorded", flush=True)
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")


def write_snapshot(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


@contextmanager
def snapshot_when_full(path: Path, remedy: str) -> Iterator[None]:
    """Where the GPU's memory runs out, writes a snapshot to `path`.

    The `torch.OutOfMemoryError` is then raised with a message of one sentence: torch's cause, `remedy`, and the file.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            write_snapshot(path)
            snapshot = f"what it held is in {path}, to be opened at {VIEWER}"
        except (OSError, RuntimeError) as failure:
            snapshot = f"what it held could not be written to {path}: {failure}"
        cause = str(error).split(". ")[0]
        raise torch.OutOfMemoryError(f"the GPU's memory is full ({cause}): {remedy}; {snapshot}.") from error
