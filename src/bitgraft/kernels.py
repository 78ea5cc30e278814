"""W~ and its gradients in one pass over memory each, for float32 weights on a CPU (`bitgraft.native` compiled).

Every function here has a slow, obvious twin in plain PyTorch, which is what runs on other devices, in other dtypes, for
small weights, and where numba is not installed. W~ and the gradient to R are the same to the last bit either way.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 1 << 14  # weights below this many elements are not worth a call, and none is worth importing a compiler for
PIECE = 1 << 17  # elements at most that a thread takes at a time: memory is read faster in long stretches
SHARES = 8  # pieces of a weight at least, as long as they are not too short, so that threads have a share each
_forked = False


def suits(*tensors: Tensor) -> bool:
    """Whether the compiled loops take these tensors: one layout, dense, float32, on a CPU, and not small."""
    first = tensors[0]
    return (
        first.numel() >= SMALL
        and all(t.device.type == "cpu" and t.dtype == torch.float32 and t.stride() == first.stride() for t in tensors)
        and _is_dense(first)
        and type(first) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and native() is not None
    )


def switch(packed: Tensor, weight: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
    """W~ from packed bits, with k0..k3 for the layer, (4,), or for each of the weight's rows, (4, rows)."""
    out, k = torch.empty_like(weight, requires_grad=False) if out is None else out, _held(k)
    _run(
        "switch",
        (weight.numel(), 1, 1),
        k,
        packed.data_ptr(),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        0,
        k.data_ptr(),
        0,
        0,
    )
    return out


def forward(scores: Tensor, threshold: float, weight: Tensor, k: Tensor, innermost: bool = False) -> Tensor:
    """W~ from R, with the bit 1[R >= threshold]; with the channels innermost if so wished, whatever W has."""
    out, k, at = _room(weight, innermost), _held(k), np.array([threshold], np.float32)
    one, two = scores.data_ptr(), weight.data_ptr()
    _run("forward", _filters(weight, out), k, one, at.ctypes.data, two, out.data_ptr(), 0, k.data_ptr(), 0, 0)
    return out


def backward(grad: Tensor, scores: Tensor, threshold: float, weight: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """dE/dM = dE/dW~ ∘ (k2 + k3 W), laid out as R, and dE/dk in the shape of k. The gradient is laid out as W, or with
    the channels innermost."""
    out, k, at = torch.empty_like(scores), _held(k), np.array([threshold], np.float32)
    rows, filters = k.numel() // 4, _filters(weight, grad)
    sums = torch.zeros(rows, len(_places("backward", filters, rows)) // rows, 4, dtype=torch.float64)
    one, two, three = scores.data_ptr(), weight.data_ptr(), k.data_ptr()
    _run("backward", filters, k, one, at.ctypes.data, two, out.data_ptr(), 0, three, grad.data_ptr(), sums.data_ptr())
    return out, sums.sum(1).float().t().reshape(k.shape)


def is_turned(weight: Tensor, other: Tensor) -> bool:
    """The other has the channels innermost, and the weight has not."""
    innermost = weight.dim() == 4 and other.is_contiguous(memory_format=torch.channels_last)
    return innermost and weight.stride() != other.stride() and weight.is_contiguous()


Filters = tuple[int, int, int]
"""How many, their channels, and the elements of each channel. One place stands for a weight that is not turned."""


def _filters(weight: Tensor, other: Tensor) -> Filters:
    if is_turned(weight, other) and (places := weight[0, 0].numel()) > 1:
        return weight.shape[0], weight.shape[1], places
    return weight.numel(), 1, 1


def _room(weight: Tensor, innermost: bool) -> Tensor:
    layout = torch.channels_last if innermost and weight.dim() == 4 else torch.preserve_format
    return torch.empty_like(weight, requires_grad=False, memory_format=layout)


def _held(k: Tensor) -> Tensor:
    """As the loops read it."""
    return k.detach().float().contiguous()


@functools.cache
def native() -> Any:
    """The compiled loops, or None where they cannot be had."""
    if os.environ.get("BITGRAFT_KERNELS") == "off" or sys.byteorder != "little":
        return None
    try:
        from bitgraft import native as compiled
    except ImportError:
        return None
    return compiled


@functools.lru_cache(maxsize=1024)
def _pieces(filters: Filters, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each piece starts, how long it is, and to which row it belongs. No piece is of two rows, or has part of a
    filter that is turned."""
    filter_size = filters[1] * filters[2]
    length = filters[0] * filter_size // rows
    piece = min(PIECE, max(PIECE >> 4, filters[0] * filter_size // SHARES))
    inside = np.arange(0, length, max(1, piece // filter_size) * filter_size)
    starts = (np.arange(rows)[:, None] * length + inside).reshape(-1)
    sizes = np.tile(np.diff(inside, append=length), rows)
    return starts, sizes, np.repeat(np.arange(rows), len(inside))


@functools.lru_cache(maxsize=1024)
def _places(name: str, filters: Filters, rows: int) -> NDArray[np.int64]:
    """The fields of each piece as `bitgraft.native` has them, counted from where the arrays begin."""
    starts, sizes, row = _pieces(filters, rows)
    fields = np.zeros((len(starts), 8), np.int64)
    fields[:, 2] = fields[:, 3] = 4 * starts
    fields[:, 4] = sizes
    fields[:, 5] = 4 * row
    if name == "switch":
        fields[:, 0], fields[:, 1] = starts // 8, starts % 8
    else:
        fields[:, 0] = fields[:, 6] = 4 * starts
        fields[:, 7] = 32 * np.arange(len(starts))
    return fields


def _run(name: str, filters: Filters, k: Tensor, *begins: int) -> None:
    """Do all pieces of a weight; `begins` are where the arrays begin that the fields of a piece are counted from."""
    rows = k.numel() // 4
    places = _places(name, filters, rows)
    job = np.empty(5 + places.size, np.int64)
    job[:5] = 0, len(places), 4 * rows, *filters[1:]  # the counter, up to where, from one k to the next
    np.add(places, begins, out=job[5:].reshape(places.shape))
    function, address = getattr(native(), name), job.ctypes.data
    threads = 1 if _forked else min(torch.get_num_threads(), len(places))
    if threads == 1:
        function.ctypes(address)
    elif (team := _team()) is not None:
        team(function.address, address, threads, 0)
    else:
        others = [_threads().submit(function.ctypes, address) for _ in range(threads - 1)]
        function.ctypes(address)
        for other in others:
            other.result()


@functools.cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """A call that runs a function in the very threads that PyTorch computes with (GNU's OpenMP), which spin for a while
    after each of its own calls and would be in the way of others."""
    try:
        call = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return call


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1), thread_name_prefix="bitgraft")


def _alone() -> None:
    """A forked process has none of its parent's threads."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alone)


def _is_dense(tensor: Tensor) -> bool:
    """The elements fill a stretch of memory without gaps, in any order of dimensions."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    return tensor.is_contiguous(memory_format=torch.channels_last_3d)
