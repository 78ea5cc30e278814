"""Memory that a step frees, kept for the next one."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # the parameters of mallopt(3)
KEEPING = {MMAP_THRESHOLD: 10 << 20, TRIM_THRESHOLD: (1 << 31) - 1, TOP_PAD: 1 << 26}
USUAL = {MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: 1 << 26, TOP_PAD: 1 << 17}  # where glibc's own rule ends up


@contextmanager
def kept() -> Iterator[None]:
    """Within it, what tensors on the CPU leave behind stays with this process (glibc; elsewhere nothing happens).

    A step takes and frees hundreds of megabytes. glibc gives large pieces back to the system at once, which gives them
    out again page by page, each cleared first: that showed in the profile of a step of ResNet-50 at 64 px.
    """
    libc = _glibc()
    _set(libc, KEEPING)
    try:
        yield
    finally:
        _set(libc, USUAL)
        if libc is not None:
            libc.malloc_trim(0)


def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (AttributeError, OSError, TypeError):
        return None


def _set(libc: Any, parameters: dict[int, int]) -> None:
    if libc is not None:
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)
