"""Winograd convolutions for training 3 x 3 kernels on a CPU: 36 products per 16 outputs instead of 144.

`tile_loops` has the arithmetic. Outputs and gradients differ from PyTorch's by about 1e-5 of the largest value. A few
maps are processed at a time, so their tiles stay in the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bitgraft.training.cpu.products import Pair
from bitgraft.transforms import kernels

LOOPS = "bitgraft.training.cpu.tile_loops"
TILE, PLANES = 4, 36  # outputs per tile and direction, and products per tile
CHUNK_BYTES = 1 << 21  # per kind of tile and thread
MIN_TILES, MIN_CHANNELS = 32, 32  # fewer are slower than PyTorch
MAX_KERNELS = 1 << 16  # input times output channels; transformed kernels take four times the memory
CHANNEL_MULTIPLE = 16  # fills the vector registers


def suits(x: Tensor, shape: torch.Size, size: Pair) -> bool:
    """Whether this is faster for a kernel of this shape, with stride 1 and outputs of this size."""
    outputs, inputs = shape[:2]
    tile_rows, tile_columns = _grid(size)
    pays = min(size) >= TILE and len(x) * tile_rows * tile_columns >= MIN_TILES and min(outputs, inputs) >= MIN_CHANNELS
    divisible = outputs % CHANNEL_MULTIPLE == 0 and inputs % CHANNEL_MULTIPLE == 0
    small = inputs * outputs <= MAX_KERNELS
    return shape[2:] == (3, 3) and pays and divisible and small and kernels.loops(LOOPS) is not None


def convolve(x: Tensor, weight: Tensor, size: Pair, padding: Pair) -> Tensor:
    """The convolution; `size` is that of the output."""
    x, filters = _channels_last(x), _to_tiles("filters", _channels_last(weight))
    out = _empty_map(x, (len(x), len(weight), *size))
    for chunk in _chunks(x, out):
        tiles = _to_tiles("inputs", x[chunk], size, padding)
        _from_tiles("outputs", tiles @ filters.transpose(1, 2), out[chunk], size)
    return out


def gradients(
    x: Tensor, grad: Tensor, weight: Tensor, padding: Pair, needs_grad_x: bool = True
) -> tuple[Tensor | None, Tensor]:
    """(dE/dx or None, dE/dW)."""
    x, grad, weight = _channels_last(x), _channels_last(grad), _channels_last(weight)
    size, filters = (grad.shape[2], grad.shape[3]), _to_tiles("filters", weight) if needs_grad_x else None
    grad_x, grad_filters = _empty_map(x, x.shape) if needs_grad_x else None, None
    for chunk in _chunks(x, grad):
        tiles, grads = _to_tiles("inputs", x[chunk], size, padding), _to_tiles("outputs", grad[chunk], size)
        if grad_filters is None:
            grad_filters = grads.transpose(1, 2) @ tiles
        else:
            grad_filters.baddbmm_(grads.transpose(1, 2), tiles)
        if grad_x is not None and filters is not None:
            _from_tiles("inputs", grads @ filters, grad_x[chunk], size, padding)
    assert grad_filters is not None
    return grad_x, _from_tiles("filters", grad_filters, _empty_map(weight, weight.shape))


def _chunks(x: Tensor, out: Tensor) -> Iterator[slice]:
    """Slices of a few maps each, of about equal size."""
    tile_rows, tile_columns = _grid((out.shape[2], out.shape[3]))
    each = 4 * PLANES * tile_rows * tile_columns * max(x.shape[1], out.shape[1])
    chunk = -(-len(x) // -(-len(x) * each // (CHUNK_BYTES * torch.get_num_threads())))
    return (slice(begin, begin + chunk) for begin in range(0, len(x), chunk))


def _to_tiles(kind: str, map: Tensor, size: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    """Transform maps to tiles, (36, tiles, channels)."""
    (tile_rows, tile_columns), channels = _grid(size), map.shape[1]
    strips = len(map) * tile_rows
    # one strip more, because planes a power of two apart would share a few cache lines
    planes = map.new_empty(PLANES, strips + 1, tile_columns, channels)
    _run("to_tiles", kind, map, planes, tile_rows, padding)
    return planes[:, :strips].flatten(1, 2)


def _from_tiles(kind: str, tiles: Tensor, map: Tensor, size: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    tile_rows, tile_columns = _grid(size)
    _run("from_tiles", kind, map, tiles.view(PLANES, -1, tile_columns, map.shape[1]), tile_rows, padding)
    return map


def _run(loop_name: str, kind: str, map: Tensor, planes: Tensor, tile_rows: int, padding: Pair) -> None:
    loop, step = getattr(kernels.loops(LOOPS), loop_name)[kind], -(-len(map) // kernels.shares())
    ours = map.detach().permute(0, 2, 3, 1).numpy(), planes.detach().numpy(), tile_rows, *padding
    kernels.run((loop, *ours, first, min(first + step, len(map))) for first in range(0, len(map), step))


def _grid(size: Pair) -> Pair:
    return -(-size[0] // TILE), -(-size[1] // TILE)


def _empty_map(map: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=map.dtype, device=map.device, memory_format=torch.channels_last)


def _channels_last(map: Tensor) -> Tensor:
    return map.contiguous(memory_format=torch.channels_last)
