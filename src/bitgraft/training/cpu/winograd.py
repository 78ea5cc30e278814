"""Convolutions of 3 x 3 that learn on a CPU, tile by tile: 36 products for 16 outputs where there were 144.

Winograd's way, as GPUs go it; `tile_loops` has the arithmetic. What a convolution gives and its gradients
differ from PyTorch's by some 1e-5 of the largest of them. A few maps are dealt with at a time, so that their tiles stay
in the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bitgraft.training.cpu.products import Pair
from bitgraft.transforms import kernels

LOOPS = "bitgraft.training.cpu.tile_loops"
EDGE, PLANES = 4, 36  # outputs of a tile in each direction, and its products
ROOM = 1 << 21  # bytes of tiles at a time, of a kind, for each thread
FEW, NARROW, LARGE, BLOCK = 32, 32, 1 << 16, 16
"""Tiles, and channels, below which it does not pay; kernels in inputs times outputs above which it does not, since they
become four times as large; and what channels come in multiples of, as a processor's registers hold them."""


def suits(x: Tensor, shape: torch.Size, size: Pair) -> bool:
    """Whether a kernel of this shape, its strides 1, gives maps of this size faster by tiles."""
    outputs, inputs = shape[:2]
    down, across = _grid(size)
    pays = min(size) >= EDGE and len(x) * down * across >= FEW and min(outputs, inputs) >= NARROW
    fits = outputs % BLOCK == 0 and inputs % BLOCK == 0 and inputs * outputs <= LARGE
    return shape[2:] == (3, 3) and pays and fits and kernels.loops(LOOPS) is not None


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
    to_x, to_filters = _map_like(x, x.shape) if to_input else None, None
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
    down, across = _grid((out.shape[2], out.shape[3]))
    each = 4 * PLANES * down * across * max(x.shape[1], out.shape[1])
    some = -(-len(x) // -(-len(x) * each // (ROOM * torch.get_num_threads())))
    return (slice(begin, begin + some) for begin in range(0, len(x), some))


def _spread(kind: str, map: Tensor, size: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    """(36, tiles, channels)."""
    (down, across), channels = _grid(size), map.shape[1]
    strips = len(map) * down
    planes = map.new_empty(PLANES, strips + 1, across, channels)  # one more: planes a power of two apart would all
    _run("spread", kind, map, planes, down, padding)  # meet in a few lines of the cache
    return planes[:, :strips].flatten(1, 2)


def _gather(kind: str, tiles: Tensor, map: Tensor, size: Pair = (1, 1), padding: Pair = (0, 0)) -> Tensor:
    down, across = _grid(size)
    _run("gather", kind, map, tiles.view(PLANES, -1, across, map.shape[1]), down, padding)
    return map


def _run(way: str, kind: str, map: Tensor, planes: Tensor, down: int, padding: Pair) -> None:
    loops, step = kernels.loops(LOOPS), -(-len(map) // kernels.shares())
    loop, number = getattr(loops, way), loops.KINDS.index(kind)
    ours = number, map.detach().permute(0, 2, 3, 1).numpy(), planes.detach().numpy(), down, *padding
    kernels.run((loop, *ours, first, min(first + step, len(map))) for first in range(0, len(map), step))


def _grid(size: Pair) -> Pair:
    return -(-size[0] // EDGE), -(-size[1] // EDGE)


def _map_like(map: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=map.dtype, device=map.device, memory_format=torch.channels_last)


def _channels_last(map: Tensor) -> Tensor:
    return map.contiguous(memory_format=torch.channels_last)
