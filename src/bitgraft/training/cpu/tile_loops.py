"""The compiled loops behind `bitgraft.training.cpu.winograd`: maps of float32, channels last, to tiles and back.

A convolution of 3 x 3 by Winograd's F(4 x 4, 3 x 3) (Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks") is y = A'[(G w G') ∘ (B' x B)] A for each tile of 4 x 4 outputs: 36 products where there were 144. There are
three matrices, for inputs, filters and outputs, and each is used in both directions. To spread is to take a window of a
map for each tile, apply the matrix to its rows and columns, and put each of the 36 places of the result into a plane of
its own, (tiles, channels). To gather is the way back, with the matrix transposed, which is also the gradient; where
windows overlap they add up.

Maps are (maps, height, width, channels) and planes (36, strips, tiles of a strip, channels). A strip is a row of tiles
of a map: together they are read and written in long stretches of memory. A piece of work is a range of maps.
"""

import numpy as np
from numba import njit

from bitgraft.transforms.kernels import compiled

EDGE = 4  # outputs of a tile in each direction
FLAGS = {"reassoc", "nsz", "contract"}  # and not that NaN and infinities never come: they must come through
KINDS = ("inputs", "outputs", "filters")
SIGNATURE = "void(i8, f4[:, :, :, ::1], f4[:, :, :, ::1], i8, i8, i8, i8, i8)"

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


@njit(inline="always")
def _times(matrix, given, out):  # type: ignore[no-untyped-def]
    """out = matrix @ given. The matrix is a constant: loops over it are unrolled, and products with 0 left out."""
    for at in range(given.shape[1]):
        for row in range(matrix.shape[0]):
            total = np.float32(0)
            for column in range(matrix.shape[1]):
                if matrix[row, column] != 0:
                    total += matrix[row, column] * given[column, at]
            out[row, at] = total


@njit(inline="always")
def _both_sides(matrix, given, half, out):  # type: ignore[no-untyped-def]
    """matrix @ window @ matrix' for each tile and channel of (window, window, tiles, channels)."""
    rows, columns = matrix.shape
    size = given.shape[2] * given.shape[3]
    _times(matrix, given.reshape(columns, columns * size), half.reshape(rows, columns * size))
    for row in range(rows):
        _times(matrix, half.reshape(rows, columns, size)[row], out.reshape(rows, rows, size)[row])


@njit(inline="always")
def _spread(maps, planes, down, above, before, first, last, matrix):  # type: ignore[no-untyped-def]
    side, window = matrix.shape
    _, height, width, channels = maps.shape
    across = planes.shape[2]
    given = np.empty((window, window, across, channels), np.float32)
    half = np.empty((side, window, across, channels), np.float32)
    out = np.empty((side, side, across, channels), np.float32)
    for strip in range(first * down, last * down):
        image, top = strip // down, strip % down * EDGE - above
        for i in range(window):
            for j in range(window):
                for a in range(across):
                    x = a * EDGE - before + j
                    if 0 <= top + i < height and 0 <= x < width:
                        for c in range(channels):
                            given[i, j, a, c] = maps[image, top + i, x, c]
                    else:
                        for c in range(channels):
                            given[i, j, a, c] = 0
        _both_sides(matrix, given, half, out)
        for i in range(side):
            for j in range(side):
                for a in range(across):
                    for c in range(channels):
                        planes[i * side + j, strip, a, c] = out[i, j, a, c]


@njit(inline="always")
def _gather(maps, planes, down, above, before, first, last, matrix):  # type: ignore[no-untyped-def]
    window, side = matrix.shape
    _, height, width, channels = maps.shape
    across = planes.shape[2]
    given = np.empty((side, side, across, channels), np.float32)
    half = np.empty((window, side, across, channels), np.float32)
    out = np.empty((window, window, across, channels), np.float32)
    maps[first:last] = 0
    for strip in range(first * down, last * down):
        image, top = strip // down, strip % down * EDGE - above
        for i in range(side):
            for j in range(side):
                for a in range(across):
                    for c in range(channels):
                        given[i, j, a, c] = planes[i * side + j, strip, a, c]
        _both_sides(matrix, given, half, out)
        for i in range(max(0, -top), min(window, height - top)):
            for a in range(across):
                left = a * EDGE - before
                for j in range(max(0, -left), min(window, width - left)):
                    for c in range(channels):
                        maps[image, top + i, left + j, c] += out[i, j, a, c]


@compiled(SIGNATURE, fastmath=FLAGS)
def spread(kind, maps, planes, down, above, before, first, last):  # type: ignore[no-untyped-def]
    if kind == 0:
        _spread(maps, planes, down, above, before, first, last, _INPUTS)
    elif kind == 1:
        _spread(maps, planes, down, above, before, first, last, _OUTPUTS)
    else:
        _spread(maps, planes, down, above, before, first, last, _FILTERS)


@compiled(SIGNATURE, fastmath=FLAGS)
def gather(kind, maps, planes, down, above, before, first, last):  # type: ignore[no-untyped-def]
    if kind == 0:
        _gather(maps, planes, down, above, before, first, last, _TO_INPUTS)
    elif kind == 1:
        _gather(maps, planes, down, above, before, first, last, _TO_OUTPUTS)
    else:
        _gather(maps, planes, down, above, before, first, last, _TO_FILTERS)
