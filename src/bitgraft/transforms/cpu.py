"""W~ and its gradients in one pass over memory each, for float32 weights on a CPU (`cpu_loops` compiled).

Every function here has a slow, obvious twin in plain PyTorch, which is what runs on other devices, in other dtypes, for
small weights, and where numba is not installed. W~ and the gradient to R are the same to the last bit either way.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 1 << 14  # weights below this many elements are not worth a call, and none is worth importing a compiler for
PIECE = 1 << 17  # elements at most that a thread takes at a time: memory is read faster in long stretches
SHARES = 8  # pieces of a weight at least, as long as they are not too short, so that threads have a share each
_forked = False


def takes(*tensors: Tensor) -> bool:
    """Whether the compiled loops, if there are any, take these tensors: one layout, dense, float32, on a CPU."""
    first = tensors[0]
    return (
        all(t.device.type == "cpu" and t.dtype == torch.float32 and t.stride() == first.stride() for t in tensors)
        and _is_dense(first)
        and type(first) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
    )


def is_large(weight: Tensor) -> bool:
    """Worth a call by itself, and there are compiled loops."""
    return weight.numel() >= SMALL and native() is not None


def worth_a_call(weights: Sequence[Tensor]) -> bool:
    """Small weights alone are not worth the import of a compiler. Where it is imported, they are worth a call."""
    imported = native.cache_info().currsize > 0
    return bool(weights) and (imported or any(w.numel() >= SMALL for w in weights)) and native() is not None


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight and a mask for it: bits, and k0..k3 for the layer, (4,), or for each of the weight's rows, (4, rows)."""

    weight: Tensor
    bits: Tensor
    k: Tensor
    out: Tensor | None = None
    """Memory for as many elements that may be used for W~."""


def switch(masks: Sequence[Packed]) -> list[Tensor]:
    """W~ of some weights from packed bits, all in one call: what a call costs is paid once."""
    outs, held = [_switched(mask) for mask in masks], [_held(mask.k) for mask in masks]
    _run("switch", [_bits(*one) for one in zip(masks, held, outs, strict=True)])
    return outs


class Switch:
    """`switch` of one weight, as a call: what can be found out beforehand has been, all but the arithmetic."""

    def __init__(self, mask: Packed) -> None:
        self._out, self._held = _switched(mask), (mask, _held(mask.k))
        self._job, count = _job([_bits(*self._held, self._out)])
        self._call = prepared(native().switch, self._job, count)

    def __call__(self) -> Tensor:
        self._job[0] = 0  # as often as it is called
        self._call()
        return self._out


def _switched(mask: Packed) -> Tensor:
    return torch.empty_like(mask.weight, requires_grad=False) if mask.out is None else mask.out


def _bits(mask: Packed, k: Tensor, out: Tensor) -> "Part":
    begins = (mask.bits.data_ptr(), 0, mask.weight.data_ptr(), out.data_ptr(), 0, k.data_ptr(), 0, 0, 0, 0, 0)
    return _places("switch", (mask.weight.numel(), 1, 1), k.numel() // 4), begins


@dataclass(frozen=True, slots=True)
class Scored:
    """A weight, scores for it, and k0..k3 as in `Packed`."""

    weight: Tensor
    scores: Tensor
    threshold: float
    k: Tensor
    channels_last: bool = False
    """Give W~ with the channels last, whatever W has."""


def forward(masks: Sequence[Scored]) -> list[Tensor]:
    """W~ of some weights from R, with the bit 1[R >= threshold], all in one call."""
    outs = [_out(mask.weight, mask.channels_last) for mask in masks]
    held = [_held(mask.k) for mask in masks]
    thresholds = np.array([mask.threshold for mask in masks], np.float32)
    at, parts = thresholds.ctypes.data, []
    for mask, k, out in zip(masks, held, outs, strict=True):
        begins = (mask.scores.data_ptr(), at, mask.weight.data_ptr(), out.data_ptr(), 0, k.data_ptr(), 0, 0, 0, 0, 0)
        parts.append((_places("forward", _filters(mask.weight, out), k.numel() // 4), begins))
        at += thresholds.itemsize
    _run("forward", parts)
    return outs


def backward(grad: Tensor, mask: Scored) -> tuple[Tensor, Tensor]:
    """dE/dM = dE/dW~ ∘ (k2 + k3 W), laid out as R, and dE/dk in the shape of k. The gradient is laid out as W, or with
    the channels last."""
    out, k, at = torch.empty_like(mask.scores), _held(mask.k), np.array([mask.threshold], np.float32)
    rows = k.numel() // 4
    places = _places("backward", _filters(mask.weight, grad), rows)
    sums = torch.zeros(rows, len(places) // rows, 4, dtype=torch.float64)
    ours = (mask.scores.data_ptr(), at.ctypes.data, mask.weight.data_ptr(), out.data_ptr(), 0, k.data_ptr(), 0)
    _run("backward", [(places, (*ours, 0, 0, grad.data_ptr(), sums.data_ptr()))])
    return out, sums.sum(1).float().t().reshape(k.shape)


def is_transposed(weight: Tensor, other: Tensor) -> bool:
    """The other has the channels last, and the weight has not."""
    channels_last = weight.dim() == 4 and other.is_contiguous(memory_format=torch.channels_last)
    return channels_last and weight.stride() != other.stride() and weight.is_contiguous()


Filters = tuple[int, int, int]
"""How many, their channels, and the elements of each channel. One place stands for a weight that is not transposed."""


def _filters(weight: Tensor, other: Tensor) -> Filters:
    if is_transposed(weight, other) and (places := weight[0, 0].numel()) > 1:
        return weight.shape[0], weight.shape[1], places
    return weight.numel(), 1, 1


def _out(weight: Tensor, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last and weight.dim() == 4 else torch.preserve_format
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
        from bitgraft.transforms import cpu_loops as compiled
    except ImportError:
        return None
    return compiled


@functools.lru_cache(maxsize=1024)
def _pieces(filters: Filters, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where each piece starts, how long it is, and to which row it belongs. No piece is of two rows, or has part of a
    filter that is transposed."""
    filter_size = filters[1] * filters[2]
    length = filters[0] * filter_size // rows
    piece = min(PIECE, max(PIECE >> 4, filters[0] * filter_size // SHARES))
    inside = np.arange(0, length, max(1, piece // filter_size) * filter_size)
    starts = (np.arange(rows)[:, None] * length + inside).reshape(-1)
    sizes = np.tile(np.diff(inside, append=length), rows)
    return starts, sizes, np.repeat(np.arange(rows), len(inside))


@functools.lru_cache(maxsize=1024)
def _places(name: str, filters: Filters, rows: int) -> NDArray[np.int64]:
    """The fields of each piece as `cpu_loops` has them, addresses counted from where the arrays begin."""
    starts, sizes, row = _pieces(filters, rows)
    fields = np.zeros((len(starts), native().FIELDS), np.int64)
    fields[:, 2] = fields[:, 3] = 4 * starts
    fields[:, 4] = sizes
    fields[:, 5], fields[:, 6] = 4 * row, 4 * rows
    fields[:, 7:9] = filters[1:]
    if name == "switch":
        fields[:, 0], fields[:, 1] = starts // 8, starts % 8
    else:
        fields[:, 0] = fields[:, 9] = 4 * starts
        fields[:, 10] = 32 * np.arange(len(starts))
    return fields


Part = tuple[NDArray[np.int64], tuple[int, ...]]
"""The fields of a weight's pieces, and where the arrays begin that they are counted from."""


def _run(name: str, parts: Sequence[Part]) -> None:
    """Do all pieces of all weights."""
    together(getattr(native(), name), *_job(parts))


def _job(parts: Sequence[Part]) -> tuple[NDArray[np.int64], int]:
    """All pieces of all weights as the loops read them, and how many there are."""
    compiled = native()
    count = sum(len(fields) for fields, _ in parts)
    job = np.empty(compiled.HEADER + count * compiled.FIELDS, np.int64)
    room = max(int(fields[0, 7] * fields[0, 8]) for fields, _ in parts)
    job[: compiled.HEADER] = 0, count, room  # the counter, up to where, and what a filter takes
    pieces, begin = job[compiled.HEADER :].reshape(count, compiled.FIELDS), 0
    for fields, begins in parts:
        end = begin + len(fields)
        np.add(fields, begins, out=pieces[begin:end])
        begin = end
    return job, count


def together(function: Any, job: NDArray[np.int64], pieces: int) -> None:
    """Do a job of so many pieces by a compiled function, in as many threads as PyTorch uses."""
    prepared(function, job, pieces)()


def prepared(function: Any, job: NDArray[np.int64], pieces: int) -> Callable[[], None]:
    """`together` as a call. Whoever makes it keeps the job until then."""
    address, threads = job.ctypes.data, 1 if _forked else min(torch.get_num_threads(), pieces)
    if threads == 1:
        return functools.partial(function.ctypes, address)
    if (team := _team()) is not None:
        return functools.partial(team, function.address, address, threads, 0)
    return functools.partial(_in_threads, function.ctypes, address, threads)


def _in_threads(function: Callable[[int], None], address: int, threads: int) -> None:
    others = [_threads().submit(function, address) for _ in range(threads - 1)]
    function(address)
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
