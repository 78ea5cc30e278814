"""The door to compiled loops: whether there are any, and the threads they run in.

Loops are compiled by numba, which is optional. Everything they compute has a twin in plain PyTorch. The environment
variable BITGRAFT_KERNELS=off leaves it to that, and leaves convolutions that learn on a CPU to PyTorch as well.
"""

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

LOOPS = "bitgraft.transforms.cpu"


def switched_on() -> bool:
    return os.environ.get("BITGRAFT_KERNELS") != "off"


@functools.cache
def loops(module: str = LOOPS) -> Any:
    """A module of compiled loops, or None where they cannot be had. The first import takes half a second."""
    if not switched_on() or sys.byteorder != "little" or importlib.util.find_spec("numba") is None:
        return None
    if module != LOOPS and loops() is None:
        return None
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a broken installation leads to
        warnings.warn(
            f"numba is installed but does not work ({type(error).__name__}: {error}). Plain PyTorch runs instead, more "
            "slowly: reinstall numba, or set BITGRAFT_KERNELS=off",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def compiled(signature: str, **flags: Any) -> Callable[[Any], Any]:
    """numba's `njit` without the interpreter's lock, compiled at once and kept on disk where there is room."""
    from numba import njit

    def decorate(function: Any) -> Any:
        try:
            return njit(signature, nogil=True, cache=True, **flags)(function)
        except RuntimeError:  # there is no folder to write to
            return njit(signature, nogil=True, **flags)(function)

    return decorate


def shares() -> int:
    """Pieces of work that takes less than a millisecond or so: PyTorch's own threads spin for as long after theirs, and
    would keep as many of ours waiting."""
    return max(1, torch.get_num_threads() // 2)


def run(pieces: Iterable[tuple[Any, ...]]) -> None:
    """Call each piece, (function, *arguments), in as many threads as PyTorch uses."""
    left = deque(pieces)

    def work() -> None:
        while left:
            try:
                function, *arguments = left.popleft()
            except IndexError:  # another thread took the last one
                return
            function(*arguments)

    others = [_threads().submit(work) for _ in range(min(torch.get_num_threads(), len(left)) - 1)]
    work()
    for other in others:
        if not other.cancel():
            other.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="bitgraft")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of its parent's threads
