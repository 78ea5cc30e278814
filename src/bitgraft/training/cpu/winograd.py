"""Convolutions of 3 x 3 that learn on a CPU, tile by tile: 36 products for 16 outputs where there were 144.

Winograd's way, as GPUs go it; `tile_loops` has the arithmetic. What a convolution gives and its gradients
differ from PyTorch's by some 1e-5 of the largest of them. A few maps are dealt with at a time, so that their tiles stay
in the cache.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitgraft.training.cpu.products import Pair
from bitgraft.transforms import cpu

EDGE = 4  # outputs of a tile in each direction
PLANES = 36  # products of a tile
BLOCK = 16  # channels come in multiples of it; as in `tile_loops`, which whoever only asks need not compile
ROOM = 1 << 22  # bytes of tiles at a time, of a kind
FEW, NARROW, LARGE = 32, 32, 1 << 16
"""Tiles, and channels, below which it does not pay, and kernels in inputs times outputs above which it does not: they
become four times as large."""
SHARES = 8  # pieces of a job at least, so that threads have a share each


def suits(x: Tensor, shape: torch.Size, size: Pair) -> bool:
    """Whether a kernel of this shape, its strides 1, gives maps of this size faster by tiles."""
    outputs, inputs = shape[:2]
    pays = min(size) >= EDGE and len(x) * _count(size) >= FEW and min(outputs, inputs) >= NARROW
    fits = outputs % BLOCK == 0 and inputs % BLOCK == 0 and inputs * outputs <= LARGE
    return shape[2:] == (3, 3) and pays and fits and cpu.native() is not None


def convolved(x: Tensor, weight: Tensor, size: Pair, padding: Pair) -> Tensor:
    """The convolution, whose output is of this size."""
    x, filters = _channels_last(x), _spread("filters", _channels_last(weight))
    out = _map_like(x, (len(x), len(weight), *size))
    for some in _chunks(x, out):
        tiles = _spread("inputs", x[some], size, padding)
        _gather("outputs", tiles @ filters.transpose(1, 2), out[some], size)
    return out


def gradients(
    x: Tensor, grad: Tensor, weight: Tensor, padding: Pair, to_input: bool = True
) -> tuple[Tensor | None, Tensor]:
    """dE/dx, if it is wanted, and dE/dW."""
    x, grad, weight = _channels_last(x), _channels_last(grad), _channels_last(weight)
    size, filters = (grad.shape[2], grad.shape[3]), _spread("filters", weight) if to_input else None
    to_x = _map_like(x, x.shape) if to_input else None
    to_filters: Tensor | None = None
    for some in _chunks(x, grad):
        tiles, grads = _spread("inputs", x[some], size, padding), _spread("outputs", grad[some], size)
        if to_filters is None:
            to_filters = grads.transpose(1, 2) @ tiles
        else:
            to_filters.baddbmm_(grads.transpose(1, 2), tiles)
        if to_x is not None and filters is not None:
            _gather("inputs", grads @ filters, to_x[some], size, padding)
    assert to_filters is not None
    return to_x, _gather("filters", to_filters, _map_like(weight, weight.shape))


def _chunks(x: Tensor, out: Tensor) -> Iterator[slice]:
    """Some maps at a time, about as many each time."""
    each = 4 * PLANES * _count((out.shape[2], out.shape[3])) * max(x.shape[1], out.shape[1])
    some = -(-len(x) // -(-len(x) * each // ROOM))
    return (slice(begin, begin + some) for begin in range(0, len(x), some))


def _spread(kind: str, map: Tensor, size: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    rows, channels = len(map) * _count(size), map.shape[1]
    apart = rows * channels + BLOCK  # a power of two would send all planes to the same few lines of the cache
    tiles = map.new_empty(PLANES * apart).as_strided((PLANES, rows, channels), (apart, channels, 1))
    _run(f"spread_{kind}", map, tiles, size, padding)
    return tiles


def _gather(kind: str, tiles: Tensor, map: Tensor, size: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    _run(f"gather_{kind}", map, tiles, size, padding)
    return map


def _run(name: str, map: Tensor, tiles: Tensor, size: Pair, padding: Pair) -> None:
    maps, channels, height, width = map.shape
    shares = max(n for n in (1, 2, 4, 8) if n == 1 or (maps * n < 2 * SHARES and channels % (n * BLOCK) == 0))
    where = map.data_ptr(), tiles.data_ptr(), 4 * tiles.stride(0), height, width, channels
    job = np.array([0, maps, shares, *where, *_grid(size), EDGE, *padding], np.int64)
    cpu.together(getattr(_loops(), name), job, maps * shares)


@functools.cache
def _loops() -> Any:
    """To import them is to compile them once."""
    from bitgraft.training.cpu import tile_loops

    return tile_loops


def _grid(size: Pair) -> Pair:
    return -(-size[0] // EDGE), -(-size[1] // EDGE)


def _count(size: Pair) -> int:
    return math.prod(_grid(size))


def _map_like(map: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=map.dtype, device=map.device, memory_format=torch.channels_last)


def _channels_last(map: Tensor) -> Tensor:
    return map.contiguous(memory_format=torch.channels_last)
