"""The memory that tensors free on a CPU, kept for the next ones."""

import ctypes
import platform

# Of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def reuse_freed_memory() -> None:
    """From now on, this process keeps the memory that it frees, so that it stays as large as at its peak.

    By default, glibc maps large blocks one by one and returns each when it is freed, and the kernel clears every page
    again at its first use: a large part of a training step whose logits take 100 MB. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        assert mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)
