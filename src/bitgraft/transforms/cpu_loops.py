"""The compiled loops behind `bitgraft.transforms.cpu`, for float32 on a CPU. To import this is to compile them once.

Each is a C function that several threads call at once with the same job: an array of 64-bit integers that holds a
counter, the number of pieces, the size of the largest filter that is transposed, and for each piece its addresses and
sizes. A thread takes the next piece until there is none. So it does not matter how many threads there are or whose they
are, and what a piece sums up does not depend on it. Pieces may be of several weights. Products and sums are not
contracted (no FMA): each operation rounds as PyTorch's own does.

W~ that learns and its gradient may lie with the channels last where W and R do not. A filter is then transposed on the
way, in the processor's cache: from `inner` channels of `places` elements each to `places` of `inner`. A piece is whole
filters.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

HEADER, FIELDS = 3, 11  # integers before the pieces, and for a piece
PLACES = np.array([1 << place for place in range(32)], np.uint32)  # numba would shift in 64 bits: half as fast
BLOCK = 1024  # elements that are summed in float32 before float64 takes over


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def _next(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), codegen


@njit
def _floats(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), (count,), np.float32)


@njit
def _job(address):  # type: ignore[no-untyped-def]
    header = carray(_pointer(address), (HEADER,), np.int64)
    pieces = carray(_pointer(address + 8 * HEADER), (header[1], FIELDS), np.int64)
    return pieces, header[2]


@njit
def _maps(k, stride):  # type: ignore[no-untyped-def]
    """Scales for bits of 0 and of 1, then shifts, as `affine` computes them, infinities included."""
    k0, k1 = _floats(k, 1)[0], _floats(k + stride, 1)[0]
    k2, k3 = _floats(k + 2 * stride, 1)[0], _floats(k + 3 * stride, 1)[0]
    none = np.float32(0)
    return k3 * none + k0, k3 + k0, k2 * none + k1, k2 + k1


@njit
def _bit_by_bit(bits, first, weight, out, scale0, scale1, shift0, shift1):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        on = (bits[(first + i) >> 3] >> np.uint8((first + i) & 7)) & np.uint8(1)
        out[i] = weight[i] * (scale1 if on else scale0) + (shift1 if on else shift0)


@njit
def _word_by_word(bits, weight, out, scale0, scale1, shift0, shift1):  # type: ignore[no-untyped-def]
    for word in range(bits.size // 4):
        at = 4 * word
        low = np.uint32(bits[at]) | np.uint32(bits[at + 1]) << np.uint32(8)
        high = np.uint32(bits[at + 2]) << np.uint32(16) | np.uint32(bits[at + 3]) << np.uint32(24)
        both = np.uint32(low | high)
        for j in range(32):
            on = np.uint32(both & PLACES[j]) != np.uint32(0)
            out[32 * word + j] = weight[32 * word + j] * (scale1 if on else scale0) + (shift1 if on else shift0)


@njit
def _from_scores(scores, threshold, weight, out, scale0, scale1, shift0, shift1):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        on = scores[i] >= threshold
        out[i] = weight[i] * (scale1 if on else scale0) + (shift1 if on else shift0)


@njit
def _transpose(given, out, inner, places):  # type: ignore[no-untyped-def]
    for place in range(places):
        for channel in range(inner):
            out[place * inner + channel] = given[channel * places + place]


@njit(fastmath={"reassoc", "nsz"})
def _sums(grad, weight, scores, threshold):  # type: ignore[no-untyped-def]
    s0 = s1 = s2 = s3 = np.float32(0)
    for i in range(grad.size):
        product = grad[i] * weight[i]
        on = np.float32(scores[i] >= threshold)  # a branch here would keep the loop from being vectorised
        s0 += product
        s1 += grad[i]
        s2 += grad[i] * on
        s3 += product * on
    return s0, s1, s2, s3


@njit
def _slopes(grad, weight, out, k2, k3):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = (weight[i] * k3 + k2) * grad[i]


@njit
def _learn(grad, weight, scores, threshold, out, k2, k3, sums):  # type: ignore[no-untyped-def]
    """The sums of a block come first: `out` may be the gradient itself."""
    for begin in range(0, grad.size, BLOCK):
        end = min(begin + BLOCK, grad.size)
        s0, s1, s2, s3 = _sums(grad[begin:end], weight[begin:end], scores[begin:end], threshold)
        sums[0] += s0
        sums[1] += s1
        sums[2] += s2
        sums[3] += s3
        _slopes(grad[begin:end], weight[begin:end], out[begin:end], k2, k3)


def _compiled(function: Callable[[Any], None]) -> Any:
    return _kept(cfunc, types.void(types.int64), function)


def _kept(compiler: Any, signature: Any, function: Any) -> Any:
    try:
        return compiler(signature, cache=True)(function)
    except RuntimeError:  # nowhere to keep it
        return compiler(signature)(function)


@_compiled
def switch(job):  # type: ignore[no-untyped-def]
    """Pieces: bits, place of the first bit in its byte, weight, out, count, k0, bytes from there to k1."""
    pieces, _ = _job(job)
    while True:
        piece = _next(job)
        if piece >= len(pieces):
            break
        bits, first, weight, out, size, k, stride = pieces[piece, :7]
        maps = _maps(k, stride)
        head = min((8 - first) & 7, size)  # up to the next whole byte
        words = (size - head) >> 5
        tail = size - head - 32 * words
        start = carray(_pointer(bits), (1,), np.uint8)
        _bit_by_bit(start, first, _floats(weight, head), _floats(out, head), *maps)
        bits, weight, out = bits + ((first + head) >> 3), weight + 4 * head, out + 4 * head
        middle = carray(_pointer(bits), (4 * words,), np.uint8)
        _word_by_word(middle, _floats(weight, 32 * words), _floats(out, 32 * words), *maps)
        end = carray(_pointer(bits + 4 * words), (4,), np.uint8)
        _bit_by_bit(end, 0, _floats(weight + 128 * words, tail), _floats(out + 128 * words, tail), *maps)


@_compiled
def forward(job):  # type: ignore[no-untyped-def]
    """Pieces: scores, threshold (1 float), weight, out, count, k0, bytes from there to k1, and how filters are
    transposed: `inner` channels of `places` elements."""
    pieces, room = _job(job)
    transposed = np.empty(room, np.float32)
    while True:
        piece = _next(job)
        if piece >= len(pieces):
            break
        scores, at, weight, out, size, k, stride, inner, places = pieces[piece, :9]
        maps, threshold = _maps(k, stride), _floats(at, 1)[0]
        if places == 1:
            _from_scores(_floats(scores, size), threshold, _floats(weight, size), _floats(out, size), *maps)
            continue
        span = inner * places
        for begin in range(0, 4 * size, 4 * span):
            r, w = _floats(scores + begin, span), _floats(weight + begin, span)
            _from_scores(r, threshold, w, transposed[:span], *maps)
            _transpose(transposed[:span], _floats(out + begin, span), inner, places)


@_compiled
def backward(job):  # type: ignore[no-untyped-def]
    """Pieces: as in `forward`, then the gradient, and sums (4 doubles)."""
    pieces, room = _job(job)
    transposed = np.empty(room, np.float32)
    while True:
        piece = _next(job)
        if piece >= len(pieces):
            break
        scores, at, weight, out, size, k, stride, inner, places, grad, totals = pieces[piece]
        threshold, sums = _floats(at, 1)[0], carray(_pointer(totals), (4,), np.float64)
        k2, k3 = _floats(k + 2 * stride, 1)[0], _floats(k + 3 * stride, 1)[0]
        span = size if places == 1 else inner * places
        for begin in range(0, 4 * size, 4 * span):
            g, w, r = _floats(grad + begin, span), _floats(weight + begin, span), _floats(scores + begin, span)
            if places > 1:
                _transpose(g, transposed[:span], places, inner)
                g = transposed[:span]
            _learn(g, w, r, threshold, _floats(out + begin, span), k2, k3, sums)


def _unroll(states, words, symbol_of, width, base, out):  # type: ignore[no-untyped-def]
    """As `bitgraft.format.entropy_coding` does it, a lane at a time."""
    lanes, read, start = len(states), 0, 0
    while start < len(out):
        for lane in range(min(lanes, len(out) - start)):
            state = states[lane]
            slot = state & np.uint64((1 << 14) - 1)
            symbol = symbol_of[slot]
            state = width[symbol] * (state >> np.uint64(14)) + slot - base[symbol]
            if state < np.uint64(1 << 16):
                if read == len(words):
                    return -1
                state = state << np.uint64(16) | words[read]
                read += 1
            states[lane], out[start + lane] = state, symbol
        start += lanes
    return read


_words, _bytes = types.uint64[::1], types.uint8[::1]
unroll = _kept(njit, types.int64(_words, _words, _bytes, _words, _words, _bytes), _unroll)
