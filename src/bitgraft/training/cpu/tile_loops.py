"""The compiled loops of `winograd`: transforms of float32 maps, channels last, to tiles and back.

Winograd's F(4 x 4, 3 x 3) (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks") computes a 3 x 3
convolution as y = A'[(G w G') ∘ (B' x B)] A for each tile of 4 x 4 outputs, with 36 products instead of 144. There is
one matrix each for inputs, filters and outputs. `to_tiles` applies it to the rows and columns of a window per tile and
writes each of the 36 results to its own plane (tiles, channels). `from_tiles` applies the transposed matrix, which is
the way back and the gradient; overlapping windows are added.

Maps are (maps, height, width, channels) and planes are (36, strips, tiles per strip, channels). A strip is one row of
tiles of a map, so memory is read and written in long runs. One call handles the maps from `first` up to `last`.
"""

from typing import Any

import numpy as np
from numba import njit

from bitgraft.transforms.kernels import compiled

TILE = 4  # outputs per tile and direction
FLAGS = {"reassoc", "nsz", "contract"}  # not nnan or ninf: NaN and infinities must propagate
SIGNATURE = "void(f4[:, :, :, ::1], f4[:, :, :, ::1], i8, i8, i8, i8, i8)"

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
MATRICES: dict[str, Any] = {"inputs": _INPUTS, "outputs": _OUTPUTS, "filters": _FILTERS}


@njit(inline="always")
def _matmul(matrix, given, out):  # type: ignore[no-untyped-def]
    """out = matrix @ given. The matrix is a constant, so loops over it are unrolled and products with 0 are skipped."""
    for at in range(given.shape[1]):
        for row in range(matrix.shape[0]):
            total = np.float32(0)
            for column in range(matrix.shape[1]):
                if matrix[row, column] != 0:
                    total += matrix[row, column] * given[column, at]
            out[row, at] = total


@njit(inline="always")
def _both_sides(matrix, given, half, out):  # type: ignore[no-untyped-def]
    """matrix @ window @ matrix' for each tile and channel; `given` is (window, window, tiles, channels)."""
    rows, columns = matrix.shape
    size = given.shape[2] * given.shape[3]
    _matmul(matrix, given.reshape(columns, columns * size), half.reshape(rows, columns * size))
    for row in range(rows):
        _matmul(matrix, half.reshape(rows, columns, size)[row], out.reshape(rows, rows, size)[row])


def _to_tiles_of(matrix):  # type: ignore[no-untyped-def]
    side, window = matrix.shape

    @compiled(SIGNATURE, fastmath=FLAGS)
    def to_tiles(maps, planes, tile_rows, pad_top, pad_left, first, last):  # type: ignore[no-untyped-def]
        _, height, width, channels = maps.shape
        tile_columns = planes.shape[2]
        given = np.empty((window, window, tile_columns, channels), np.float32)
        half = np.empty((side, window, tile_columns, channels), np.float32)
        out = np.empty((side, side, tile_columns, channels), np.float32)
        for strip in range(first * tile_rows, last * tile_rows):
            image, top = strip // tile_rows, strip % tile_rows * TILE - pad_top
            for i in range(window):
                for j in range(window):
                    for a in range(tile_columns):
                        x = a * TILE - pad_left + j
                        if 0 <= top + i < height and 0 <= x < width:
                            for c in range(channels):
                                given[i, j, a, c] = maps[image, top + i, x, c]
                        else:
                            for c in range(channels):
                                given[i, j, a, c] = 0
            _both_sides(matrix, given, half, out)
            for i in range(side):
                for j in range(side):
                    for a in range(tile_columns):
                        for c in range(channels):
                            planes[i * side + j, strip, a, c] = out[i, j, a, c]

    return to_tiles


def _from_tiles_of(matrix):  # type: ignore[no-untyped-def]
    window, side = matrix.shape

    @compiled(SIGNATURE, fastmath=FLAGS)
    def from_tiles(maps, planes, tile_rows, pad_top, pad_left, first, last):  # type: ignore[no-untyped-def]
        _, height, width, channels = maps.shape
        tile_columns = planes.shape[2]
        given = np.empty((side, side, tile_columns, channels), np.float32)
        half = np.empty((window, side, tile_columns, channels), np.float32)
        out = np.empty((window, window, tile_columns, channels), np.float32)
        maps[first:last] = 0
        for strip in range(first * tile_rows, last * tile_rows):
            image, top = strip // tile_rows, strip % tile_rows * TILE - pad_top
            for i in range(side):
                for j in range(side):
                    for a in range(tile_columns):
                        for c in range(channels):
                            given[i, j, a, c] = planes[i * side + j, strip, a, c]
            _both_sides(matrix, given, half, out)
            for i in range(max(0, -top), min(window, height - top)):
                for a in range(tile_columns):
                    left = a * TILE - pad_left
                    for j in range(max(0, -left), min(window, width - left)):
                        for c in range(channels):
                            maps[image, top + i, left + j, c] += out[i, j, a, c]

    return from_tiles


to_tiles = {kind: _to_tiles_of(matrix) for kind, matrix in MATRICES.items()}
from_tiles = {kind: _from_tiles_of(np.ascontiguousarray(matrix.T)) for kind, matrix in MATRICES.items()}
