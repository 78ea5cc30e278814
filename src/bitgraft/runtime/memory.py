"""Settings of glibc's malloc."""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt
MAX_KEPT, MAX_HEAP_BLOCK = 2**31 - 1, 2**25  # bytes


def keep_freed_memory() -> None:
    """Keep memory that a batch frees for the next batch.

    By default glibc returns it to the system, and page faults bring it back. Call this only in bitgraft's own
    processes: a library must not change malloc for its caller.
    """
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, MAX_KEPT)
        libc.mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK)


def give_memory_back() -> None:
    """Return freed memory to the system."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
