"""The compiled loops behind `bitgraft.training.cpu.winograd`: maps of float32, channels last, to tiles and back.

A convolution of 3 x 3 by Winograd's F(4 x 4, 3 x 3) (Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks") is y = A'[(G w G') ∘ (B' x B)] A for each tile of 4 x 4 outputs: 36 products where there were 144. There are
three matrices, for inputs, filters and outputs, and each is used in both directions. To spread is to take a window of a
map for each tile, apply the matrix to its rows and columns, and put each of the 36 places of the result into a plane of
its own, (tiles, channels). To gather is the way back, with the matrix transposed, which is also the gradient; where
windows overlap they add up.

Several threads call a function at once with the same job, as in `transforms.cpu_loops`; a piece is some channels of a
map.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from bitgraft.transforms.cpu_loops import _kept, _next, _pointer

FIELDS = 14  # integers of a job: the counter, maps, shares of their channels, and the rest as `_spread` has it
BLOCK = 16  # channels that are dealt with at a time
FOLD = {"reassoc", "nsz", "nnan", "ninf", "contract"}  # what it takes to leave out a product with 0

_INPUTS = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ],
    np.float32,
)
_OUTPUTS = np.array(
    [[1, 0, 0, 0], [1, 1, 1, 1], [1, -1, 1, -1], [1, 2, 4, 8], [1, -2, 4, -8], [0, 0, 0, 1]], np.float32
)
_FILTERS = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], np.float32) / 24
_TO_INPUTS, _TO_OUTPUTS, _TO_FILTERS = (np.ascontiguousarray(matrix.T) for matrix in (_INPUTS, _OUTPUTS, _FILTERS))


def _on_block(write: Callable[..., Any]) -> Any:
    """A function of addresses of BLOCK floats, each a vector to the compiler, which need not fear that they overlap."""
    kind = ir.VectorType(ir.FloatType(), BLOCK)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, *given = [builder.inttoptr(address, kind.as_pointer()) for address in args]
        builder.store(
            write(builder, kind, builder.load(to, align=4), *(builder.load(g, align=4) for g in given)), to, align=4
        )
        return context.get_dummy_value()

    return codegen


@intrinsic
def _copy(typing: Any, to: Any, given: Any) -> Any:
    return types.void(types.int64, types.int64), _on_block(lambda builder, kind, old, new: new)


@intrinsic
def _add(typing: Any, to: Any, given: Any) -> Any:
    return types.void(types.int64, types.int64), _on_block(lambda builder, kind, old, new: builder.fadd(old, new))


@intrinsic
def _clear(typing: Any, to: Any) -> Any:
    return types.void(types.int64), _on_block(lambda builder, kind, old: ir.Constant(kind, None))


@intrinsic
def _expect(typing: Any, address: Any) -> Any:
    """Fetch a line of memory ahead of its use: planes lie too far apart for the processor to see what comes next."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [builder.inttoptr(args[0], pointer), i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(inline="always")
def _on_both_sides(matrix, work, half):  # type: ignore[no-untyped-def]
    """A block of (columns, columns, BLOCK) at the beginning of `work` to one of (rows, rows, BLOCK) there."""
    rows, columns = matrix.shape
    for at in range(columns * BLOCK):
        for row in range(rows):
            total = np.float32(0)
            for column in range(columns):
                total += matrix[row, column] * work[column * columns * BLOCK + at]
            work[half + row * columns * BLOCK + at] = total
    for first in range(rows):
        for at in range(BLOCK):
            for row in range(rows):
                total = np.float32(0)
                for column in range(columns):
                    total += matrix[row, column] * work[half + (first * columns + column) * BLOCK + at]
                work[(first * rows + row) * BLOCK + at] = total


@njit(inline="always")
def _spread(job, matrix):  # type: ignore[no-untyped-def]
    side, window = matrix.shape
    _, maps, shares, map_, tiles, plane, height, width, channels, down, across, step, above, before = carray(
        _pointer(job), (FIELDS,), np.int64
    )
    half = side * side * BLOCK  # a window is no larger
    work = np.empty(2 * half, np.float32)
    here, share = work.ctypes.data, channels // shares
    while True:
        piece = _next(job)
        if piece >= maps * shares:
            break
        image, begin = piece // shares, (piece % shares) * share
        start = map_ + 4 * image * height * width * channels
        for tile in range(down * across):
            top, left = tile // across * step - above, tile % across * step - before
            to = tiles + 4 * (image * down * across + tile) * channels
            for channel in range(begin, begin + share, BLOCK):
                for i in range(window):
                    for j in range(window):
                        place = here + 4 * (i * window + j) * BLOCK
                        if 0 <= top + i < height and 0 <= left + j < width:
                            _copy(place, start + 4 * (((top + i) * width + left + j) * channels + channel))
                        else:
                            _clear(place)
                _on_both_sides(matrix, work, half)
                for place in range(side * side):
                    _copy(to + place * plane + 4 * channel, here + 4 * place * BLOCK)
                    _expect(to + place * plane + 4 * (channel + BLOCK))


@njit(inline="always")
def _gather(job, matrix):  # type: ignore[no-untyped-def]
    window, side = matrix.shape
    _, maps, shares, map_, tiles, plane, height, width, channels, down, across, step, above, before = carray(
        _pointer(job), (FIELDS,), np.int64
    )
    half = side * side * BLOCK  # a window is no larger
    work = np.empty(2 * half, np.float32)
    here, share = work.ctypes.data, channels // shares
    while True:
        piece = _next(job)
        if piece >= maps * shares:
            break
        image, begin = piece // shares, (piece % shares) * share
        start = map_ + 4 * image * height * width * channels
        if window > step:
            for pixel in range(height * width):
                for channel in range(begin, begin + share, BLOCK):
                    _clear(start + 4 * (pixel * channels + channel))
        for tile in range(down * across):
            top, left = tile // across * step - above, tile % across * step - before
            given = tiles + 4 * (image * down * across + tile) * channels
            for channel in range(begin, begin + share, BLOCK):
                for place in range(side * side):
                    _copy(here + 4 * place * BLOCK, given + place * plane + 4 * channel)
                    _expect(given + place * plane + 4 * (channel + BLOCK))
                _on_both_sides(matrix, work, half)
                for i in range(max(0, -top), min(window, height - top)):
                    for j in range(max(0, -left), min(window, width - left)):
                        to = start + 4 * (((top + i) * width + left + j) * channels + channel)
                        if window > step:
                            _add(to, here + 4 * (i * window + j) * BLOCK)
                        else:
                            _copy(to, here + 4 * (i * window + j) * BLOCK)


def _compiled(function: Callable[[Any], None]) -> Any:
    def compiler(signature: Any, **kwargs: Any) -> Any:
        return cfunc(signature, fastmath=FOLD, **kwargs)

    return _kept(compiler, types.void(types.int64), function)


@_compiled
def spread_inputs(job):  # type: ignore[no-untyped-def]
    _spread(job, _INPUTS)


@_compiled
def spread_outputs(job):  # type: ignore[no-untyped-def]
    _spread(job, _OUTPUTS)


@_compiled
def spread_filters(job):  # type: ignore[no-untyped-def]
    _spread(job, _FILTERS)


@_compiled
def gather_inputs(job):  # type: ignore[no-untyped-def]
    _gather(job, _TO_INPUTS)


@_compiled
def gather_outputs(job):  # type: ignore[no-untyped-def]
    _gather(job, _TO_OUTPUTS)


@_compiled
def gather_filters(job):  # type: ignore[no-untyped-def]
    _gather(job, _TO_FILTERS)
