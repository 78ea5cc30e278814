"""A convolution as a matrix product for each place of its kernel, of the inputs that the place meets.

Padding, which is zero, adds nothing and is left out: on maps of 2 x 2 it is what a kernel of 3 x 3 meets at 20 of 36
places. With the channels last no product needs a copy of the weight.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[int, int]
Pixels = tuple[slice, slice, slice]


def convolved(x: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """A dense convolution, whose output is of this size."""
    inputs, out = x.permute(0, 2, 3, 1), x.new_zeros(len(x), *size, len(weight))
    for i, j, before, after in _meetings(x.shape[2:], size, weight.shape[2:], stride, padding, dilation):
        _add(out[after], _rows(inputs[before]) @ weight[:, :, i, j].t())
    return out.permute(0, 3, 1, 2)


def input_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dx of a dense convolution."""
    grads, out = grad.permute(0, 2, 3, 1), grad.new_zeros(len(x), *x.shape[2:], x.shape[1])
    for i, j, before, after in _meetings(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation):
        _add(out[before], _rows(grads[after]) @ weight[:, :, i, j])
    return out.permute(0, 3, 1, 2)


def weight_gradient(x: Tensor, grad: Tensor, shape: torch.Size, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dW of a dense or depthwise convolution: for each place of the kernel, the sum over images and pixels of dE/dy
    times the input that it met there."""
    inputs, grads = x.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1)
    meetings = _meetings(x.shape[2:], grad.shape[2:], shape[2:], stride, padding, dilation)
    out = grad.new_empty(shape[0], *shape[2:], shape[1])
    if len(meetings) < shape[2] * shape[3]:
        out.zero_()
    for i, j, before, after in meetings:
        if x.shape[1] == shape[1]:
            torch.mm(_rows(grads[after]).t(), _rows(inputs[before]), out=out[:, i, j])
        else:
            torch.sum(inputs[before] * grads[after], (0, 1, 2), out=out[:, i, j, 0])
    return out.permute(0, 3, 1, 2)


def _add(some: Tensor, product: Tensor) -> None:
    some += product.view(some.shape)


def _rows(map: Tensor) -> Tensor:
    return map.reshape(-1, map.shape[3])


@functools.lru_cache(maxsize=1024)
def _meetings(
    inputs: Sequence[int], outputs: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> list[tuple[int, int, Pixels, Pixels]]:
    """The places of a kernel that meet more than padding: which inputs, and at which outputs."""
    found = []
    for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
        rows = _met(i, inputs[0], outputs[0], stride[0], padding[0], dilation[0])
        columns = _met(j, inputs[1], outputs[1], stride[1], padding[1], dilation[1])
        if rows is not None and columns is not None:
            found.append((i, j, (slice(None), rows[0], columns[0]), (slice(None), rows[1], columns[1])))
    return found


def _met(place: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice] | None:
    """Which inputs a place of the kernel meets, and at which outputs."""
    first = place * dilation - padding
    low = max(0, -(first // stride))
    high = min(outputs - 1, (size - 1 - first) // stride)
    if low > high:
        return None
    return slice(low * stride + first, high * stride + first + 1, stride), slice(low, high + 1)
