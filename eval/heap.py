"""Keeps the memory that tensors free on a CPU for the next ones."""

import ctypes
import platform

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def reuse_freed_memory() -> None:
    """Makes this process keep the memory that it frees, so it stays as large as at its peak.

    By default, glibc maps each large block separately and unmaps it when freed, so the kernel clears every page again.
    With logits of 100 MB that is a large part of a training step. Other C libraries are not changed.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        assert mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)
