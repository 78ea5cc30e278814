"""A convolution as one matrix product per tap (position of the kernel), over the inputs that the tap sees.

Padding is skipped: on 2 x 2 maps it is 20 of the 36 inputs of a 3 x 3 kernel. In channels_last no product copies the
weight.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[int, int]
Pixels = tuple[slice, slice, slice]


def convolve(x: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """A dense convolution; `size` is that of the output."""
    inputs, out = x.permute(0, 2, 3, 1), x.new_zeros(len(x), *size, len(weight))
    for i, j, seen, at in _taps(x.shape[2:], size, weight.shape[2:], stride, padding, dilation):
        _accumulate(out[at], _rows(inputs[seen]) @ weight[:, :, i, j].t())
    return out.permute(0, 3, 1, 2)


def input_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dx of a dense convolution."""
    grads, out = grad.permute(0, 2, 3, 1), grad.new_zeros(len(x), *x.shape[2:], x.shape[1])
    for i, j, seen, at in _taps(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation):
        _accumulate(out[seen], _rows(grads[at]) @ weight[:, :, i, j])
    return out.permute(0, 3, 1, 2)


def weight_gradient(x: Tensor, grad: Tensor, shape: torch.Size, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dW of a dense or depthwise convolution: for each tap, the sum over all pixels of dE/dy times its input."""
    inputs, grads = x.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1)
    taps = _taps(x.shape[2:], grad.shape[2:], shape[2:], stride, padding, dilation)
    out = grad.new_empty(shape[0], *shape[2:], shape[1])
    if len(taps) < shape[2] * shape[3]:
        out.zero_()
    for i, j, seen, at in taps:
        if x.shape[1] == shape[1]:
            torch.mm(_rows(grads[at]).t(), _rows(inputs[seen]), out=out[:, i, j])
        else:
            torch.sum(inputs[seen] * grads[at], (0, 1, 2), out=out[:, i, j, 0])
    return out.permute(0, 3, 1, 2)


def _accumulate(target: Tensor, product: Tensor) -> None:
    target += product.view(target.shape)


def _rows(map: Tensor) -> Tensor:
    return map.reshape(-1, map.shape[3])


@functools.lru_cache(maxsize=1024)
def _taps(
    inputs: Sequence[int], outputs: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> list[tuple[int, int, Pixels, Pixels]]:
    """(row, column, its inputs, their outputs) of each tap that sees more than padding."""
    found = []
    for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
        rows = _overlap(i, inputs[0], outputs[0], stride[0], padding[0], dilation[0])
        columns = _overlap(j, inputs[1], outputs[1], stride[1], padding[1], dilation[1])
        if rows is not None and columns is not None:
            found.append((i, j, (slice(None), rows[0], columns[0]), (slice(None), rows[1], columns[1])))
    return found


def _overlap(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice] | None:
    """(inputs that a tap sees, their outputs) along one dimension."""
    first = tap * dilation - padding
    low = max(0, -(first // stride))
    high = min(outputs - 1, (size - 1 - first) // stride)
    if low > high:
        return None
    return slice(low * stride + first, high * stride + first + 1, stride), slice(low, high + 1)
