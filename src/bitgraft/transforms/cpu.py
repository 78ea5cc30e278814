"""The compiled loops for float32 on a CPU: bits to W~, R to W~, and gradients, each in one pass over memory.

Import this module only through `kernels.loops()`: importing it compiles the loops. Arrays are (filters, elements) in
memory order, and threads split the filters. There is no FMA contraction: every operation rounds as in PyTorch, so W~
and the gradient to R equal PyTorch's to the last bit.

In training, W~ and its gradient may be channels-last while W and R are not. Each filter is then transposed on the fly,
in the processor's cache, between (channels, area) and (area, channels), where area is the number of kernel elements.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from bitgraft.transforms.affine import Operands
from bitgraft.transforms.kernels import compiled, run, shares

PIECE = 1 << 17  # most elements per piece of work: long runs of memory are read faster
MIN_PIECES = 8  # per weight, unless they would be short, so that every thread has work
BLOCK = 1024  # elements summed in float32 before they are added up in float64
LANES = 16  # partial sums, as many as a vector register holds
BIT = np.array([1 << place for place in range(32)], np.uint32)  # a table, as numba would shift in slower 64 bits


def affine(batch: Sequence[Operands]) -> list[Tensor]:
    """Return W~ of several weights in one call, so that threads are woken only once."""
    outs: list[Tensor] = []
    pieces: list[tuple[Any, ...]] = []
    for one in batch:
        layout = torch.channels_last if one.channels_last else torch.preserve_format
        out = one.out
        if out is None or _layout(out) != _layout(one.weight):
            out = torch.empty_like(one.weight, memory_format=layout, requires_grad=False)
        k, area = _k(one.k), _transposed_area(one.weight, out)
        weight, to = _rows([one.weight, out], k, area)
        if one.is_packed:
            call: tuple[Any, ...] = (from_bits, one.mask.numpy(), weight, k, to)
        else:
            scores = _rows([one.mask], k, area)[0]
            call = from_scores, scores, weight, k, np.float32(one.threshold), to, area
        size = min(PIECE, max(PIECE // 16, weight.size // MIN_PIECES))
        pieces += [(*call, *rows) for rows in _ranges(weight, size)]
        outs.append(out)
    run(pieces)
    return outs


def gradients(grad: Tensor, one: Operands) -> tuple[Tensor, Tensor]:
    """Return dE/dM = dE/dW~ ∘ (k2 + k3 W), strided like R, and dE/dk. `grad` is strided like W or channels-last."""
    out, k, area = torch.empty_like(one.mask, requires_grad=False), _k(one.k), _transposed_area(one.weight, grad)
    g, weight, scores, to = _rows([grad, one.weight, one.mask, out], k, area)
    sums = torch.zeros(len(weight), 4, dtype=torch.float64)
    call = to_mask_and_k, g, weight, scores, k, np.float32(one.threshold), to, sums.numpy(), area
    run((*call, *rows) for rows in _ranges(weight, -(-weight.size // shares())))
    totals = sums if k.shape[1] > 1 else sums.sum(0, keepdim=True)
    return out, totals.t().reshape(one.k.shape).to(one.k.dtype)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _rows(tensors: Sequence[Tensor], k: NDArray[Any], area: int) -> list[NDArray[Any]]:
    """Return each tensor as (filters, elements) in memory order.

    Filters that share one k and are not transposed are merged, since longer rows are faster.
    """
    filters, length = len(tensors[0]), tensors[0][0].numel()
    merged = math.gcd(filters, PIECE // 16 // length) if k.shape[1] == area == 1 and length else 1
    flat = [tensor.detach() if tensor.is_contiguous() else tensor.detach().movedim(1, -1) for tensor in tensors]
    return [tensor.numpy().reshape(filters // max(1, merged), -1) for tensor in flat]


def _k(k: Tensor) -> NDArray[Any]:
    """Return k as (4, 1) or (4, filters), copied because a file's tensor may not be aligned."""
    return np.array(k.detach().float().numpy(), order="C").reshape(4, -1)


def _transposed_area(weight: Tensor, other: Tensor) -> int:
    """Return the kernel's number of elements if the other tensor is transposed, else 1."""
    return weight[0, 0].numel() if other.stride() != weight.stride() else 1


def _ranges(weight: NDArray[Any], size: int) -> Iterator[tuple[int, int]]:
    """Split the rows into ranges (first, last) of about `size` elements, `last` excluded."""
    rows, length = weight.shape
    step = max(1, size // max(1, length))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


@njit
def _scales_and_shifts(k, row):  # type: ignore[no-untyped-def]
    """Return the scales for bits 0 and 1, then the shifts, exactly as `affine.affine` computes them."""
    row, zero = row if k.shape[1] > 1 else 0, np.float32(0)
    k0, k1, k2, k3 = k[0, row], k[1, row], k[2, row], k[3, row]
    return k3 * zero + k0, k3 + k0, k2 * zero + k1, k2 + k1


@njit
def _bit_by_bit(bits, first, weight, out, scale0, scale1, shift0, shift1):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        on = (bits[(first + i) >> 3] >> np.uint8((first + i) & 7)) & np.uint8(1)
        out[i] = weight[i] * (scale1 if on else scale0) + (shift1 if on else shift0)


@njit
def _word_by_word(bits, weight, out, scale0, scale1, shift0, shift1):  # type: ignore[no-untyped-def]
    for word in range(out.size // 32):
        at = 4 * word
        low = np.uint32(bits[at]) | np.uint32(bits[at + 1]) << np.uint32(8)
        high = np.uint32(bits[at + 2]) << np.uint32(16) | np.uint32(bits[at + 3]) << np.uint32(24)
        both = np.uint32(low | high)
        for j in range(32):
            on = np.uint32(both & BIT[j]) != np.uint32(0)
            out[32 * word + j] = weight[32 * word + j] * (scale1 if on else scale0) + (shift1 if on else shift0)


@compiled("void(u1[::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], i8, i8)")
def from_bits(bits, weight, k, out, first, last):  # type: ignore[no-untyped-def]
    length = weight.shape[1]
    for row in range(first, last):
        maps, at = _scales_and_shifts(k, row), row * length
        head = min(-at & 7, length)  # elements before the next whole byte
        body = head + ((length - head) & ~31)
        w, o = weight[row], out[row]
        _bit_by_bit(bits, at, w[:head], o[:head], *maps)
        _word_by_word(bits[(at + head) >> 3 :], w[head:body], o[head:body], *maps)
        _bit_by_bit(bits, at + body, w[body:], o[body:], *maps)


@njit
def _transpose(given, out, inner, outer):  # type: ignore[no-untyped-def]
    """Transpose (inner, outer) to (outer, inner)."""
    for i in range(outer):
        for j in range(inner):
            out[i * inner + j] = given[j * outer + i]


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4, f4[:, ::1], i8, i8, i8)")
def from_scores(scores, weight, k, threshold, out, area, first, last):  # type: ignore[no-untyped-def]
    length = weight.shape[1]
    buffer = np.empty(length, np.float32)
    for row in range(first, last):
        scale0, scale1, shift0, shift1 = _scales_and_shifts(k, row)
        w, r, to = weight[row], scores[row], buffer if area > 1 else out[row]
        for i in range(length):
            on = r[i] >= threshold
            to[i] = w[i] * (scale1 if on else scale0) + (shift1 if on else shift0)
        if area > 1:
            _transpose(buffer, out[row], length // area, area)


@njit
def _sums(grad, weight, scores, threshold):  # type: ignore[no-untyped-def]
    """Return the four sums over a block. Separate lanes vectorise, and their order never depends on the compiler."""
    lanes = np.zeros((4, LANES), np.float32)
    whole = grad.size - grad.size % LANES
    for begin in range(0, whole, LANES):
        g, w, r = grad[begin : begin + LANES], weight[begin : begin + LANES], scores[begin : begin + LANES]
        for j in range(LANES):
            _add(lanes, j, g[j], w[j], r[j], threshold)
    for i in range(whole, grad.size):
        _add(lanes, i - whole, grad[i], weight[i], scores[i], threshold)
    for j in range(1, LANES):
        for i in range(4):
            lanes[i, 0] += lanes[i, j]
    return lanes[0, 0], lanes[1, 0], lanes[2, 0], lanes[3, 0]


@njit(inline="always")
def _add(lanes, j, grad, weight, score, threshold):  # type: ignore[no-untyped-def]
    product = grad * weight
    on = np.float32(score >= threshold)  # not a branch, which would prevent vectorisation
    lanes[0, j] += product
    lanes[1, j] += grad
    lanes[2, j] += grad * on
    lanes[3, j] += product * on


@njit
def _slopes(grad, weight, out, k2, k3):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = (weight[i] * k3 + k2) * grad[i]


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4, f4[:, ::1], f8[:, ::1], i8, i8, i8)")
def to_mask_and_k(grad, weight, scores, k, threshold, out, sums, area, first, last):  # type: ignore[no-untyped-def]
    length = weight.shape[1]
    buffer = np.empty(length, np.float32)
    for row in range(first, last):
        k2, k3 = k[2, row if k.shape[1] > 1 else 0], k[3, row if k.shape[1] > 1 else 0]
        g, w, r, to = grad[row], weight[row], scores[row], out[row]
        if area > 1:
            _transpose(g, buffer, area, length // area)
            g = buffer
        for begin in range(0, length, BLOCK):
            end = min(begin + BLOCK, length)
            s0, s1, s2, s3 = _sums(g[begin:end], w[begin:end], r[begin:end], threshold)
            sums[row, 0] += s0
            sums[row, 1] += s1
            sums[row, 2] += s2
            sums[row, 3] += s3
            _slopes(g[begin:end], w[begin:end], to[begin:end], k2, k3)


@compiled("i8(u8[::1], u8[::1], u1[:, ::1], u8[:, ::1], u8[:, ::1], i8[::1], u1[::1])")
def unroll(states, words, symbol_of, width, base, ends, out):  # type: ignore[no-untyped-def]
    """Decode one lane at a time (`bitgraft.format.entropy_coding`). Return the words read, or -1 if too few."""
    lanes, read, start, table = len(states), 0, 0, 0
    while start < len(out):
        for lane in range(min(lanes, len(out) - start)):
            while start + lane >= ends[table]:
                table += 1
            state = states[lane]
            slot = state & np.uint64((1 << 14) - 1)
            symbol = symbol_of[table, slot]
            state = width[table, symbol] * (state >> np.uint64(14)) + slot - base[table, symbol]
            if state < np.uint64(1 << 16):
                if read == len(words):
                    return -1
                state = state << np.uint64(16) | words[read]
                read += 1
            states[lane], out[start + lane] = state, symbol
        start += lanes
    return read
