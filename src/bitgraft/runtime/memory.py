"""What the C library does with freed memory."""

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT, LARGEST = 2**31 - 1, 2**25  # bytes


def keep_freed_memory() -> None:
    """Let the C library keep what a batch frees for the next one.

    glibc returns it to the system otherwise, and gets it back page by page. This is for our own processes: a library
    does not change malloc for its caller.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(TRIM_THRESHOLD, KEPT)
        libc.mallopt(MMAP_THRESHOLD, LARGEST)


def give_memory_back() -> None:
    """Let the C library return what was freed to the system."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
