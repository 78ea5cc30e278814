"""Access to the compiled loops, and the threads that run them.

Loops are compiled by numba, which is optional: everything they compute is also implemented in PyTorch. Setting the
environment variable BITGRAFT_KERNELS=off disables them, along with the faster CPU convolutions in training.
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
    """Return a module of compiled loops, or None if they are not available. The first import takes half a second."""
    if not switched_on() or sys.byteorder != "little" or importlib.util.find_spec("numba") is None:
        return None
    if module != LOOPS and loops() is None:
        return None
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation can raise anything
        warnings.warn(
            f"numba is installed but does not work ({type(error).__name__}: {error}). Plain PyTorch runs instead, "
            "which is slower: reinstall numba, or set BITGRAFT_KERNELS=off",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def compiled(signature: str, **flags: Any) -> Callable[[Any], Any]:
    """numba's `njit`, compiled eagerly and without the GIL, and cached on disk if possible."""
    from numba import njit

    def decorate(function: Any) -> Any:
        try:
            return njit(signature, nogil=True, cache=True, **flags)(function)
        except RuntimeError:  # no writable folder for the cache
            return njit(signature, nogil=True, **flags)(function)

    return decorate


def shares() -> int:
    """Return how many pieces to split work of less than about a millisecond into.

    PyTorch's own threads spin for that long after their work, and would keep as many of ours waiting.
    """
    return max(1, torch.get_num_threads() // 2)


def run(pieces: Iterable[tuple[Any, ...]]) -> None:
    """Call each piece, (function, *arguments), in as many threads as PyTorch uses."""
    queue = deque(pieces)

    def work() -> None:
        while queue:
            try:
                function, *arguments = queue.popleft()
            except IndexError:  # another thread took the last one
                return
            function(*arguments)

    helpers = [_threads().submit(work) for _ in range(min(torch.get_num_threads(), len(queue)) - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="bitgraft")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
