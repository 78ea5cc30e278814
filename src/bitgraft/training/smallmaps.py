"""Convolutions that learn on a CPU, where their maps are small.

oneDNN's gradients are slow there, for the weights above all: half of a step of EfficientNet-Lite0 at 64 px would go
into its depthwise layers (`make bench ROWS=smallmaps`), and much of one of ResNet-50 into its last three dense ones.
Small images on a CPU are what one tries a task with first.

A convolution is a matrix product for each place of its kernel, of the inputs that the place meets. Padding, which is
zero, adds nothing and is left out: on maps of 2 x 2 it is what a kernel of 3 x 3 meets at 20 of 36 places. With the
channels innermost no product needs a copy of the weight.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]
Pixels = tuple[slice, slice, slice]

SMALL, POINTWISE, TINY = 16, 256, 4
"""Pixels of the largest maps for which products are the faster way: to the gradient of a dense kernel, to that of a
kernel of one place, and to what a convolution gives and the gradient of what it takes in."""


def convolved(x: Tensor, weight: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """A dense convolution, whose output is of this size."""
    inputs, sums = x.permute(0, 2, 3, 1), _Sums(x, (len(x), *size, len(weight)))
    for i, j, before, after in _meetings(x.shape[2:], size, weight.shape[2:], stride, padding, dilation):
        sums.add(after, _rows(inputs, before) @ weight[:, :, i, j].t())
    return sums.total().permute(0, 3, 1, 2)


def input_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dx of a dense convolution."""
    grads, sums = grad.permute(0, 2, 3, 1), _Sums(grad, (len(x), *x.shape[2:], x.shape[1]))
    for i, j, before, after in _meetings(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation):
        sums.add(before, _rows(grads, after) @ weight[:, :, i, j])
    return sums.total().permute(0, 3, 1, 2)


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
            torch.mm(_rows(grads, after).t(), _rows(inputs, before), out=out[:, i, j])
        else:
            torch.sum(_some(inputs, before) * _some(grads, after), (0, 1, 2), out=out[:, i, j, 0])
    return out.permute(0, 3, 1, 2)


class _Sums:
    """Products that are added up, each over some pixels of a map."""

    def __init__(self, like: Tensor, shape: tuple[int, ...]) -> None:
        self.like, self.shape = like, shape
        self.sum: Tensor | None = None

    def add(self, pixels: Pixels | None, product: Tensor) -> None:
        if self.sum is None and pixels is None:
            self.sum = product.view(self.shape)
            return
        some = _some(self.total(), pixels)
        some += product.view(some.shape)

    def total(self) -> Tensor:
        if self.sum is None:
            self.sum = self.like.new_zeros(self.shape)
        return self.sum


@functools.lru_cache(maxsize=1024)
def _meetings(
    inputs: Sequence[int], outputs: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> list[tuple[int, int, Pixels | None, Pixels | None]]:
    """The places of a kernel that meet more than padding: which inputs, and at which outputs, None for all of them. The
    middle comes first, which mostly meets all."""
    found = []
    for i, j in itertools.product(_from_the_middle(kernel[0]), _from_the_middle(kernel[1])):
        rows = _met(i, inputs[0], outputs[0], stride[0], padding[0], dilation[0])
        columns = _met(j, inputs[1], outputs[1], stride[1], padding[1], dilation[1])
        if rows is not None and columns is not None:
            before, after = zip(rows, columns, strict=True)
            found.append((i, j, _unless_all(before, inputs), _unless_all(after, outputs)))
    return found


def _from_the_middle(size: int) -> list[int]:
    return sorted(range(size), key=lambda place: abs(place - size // 2))


def _unless_all(pixels: tuple[slice, slice], size: Sequence[int]) -> Pixels | None:
    whole = [range(*one.indices(length)) == range(length) for one, length in zip(pixels, size, strict=True)]
    return None if all(whole) else (slice(None), *pixels)


def _some(map: Tensor, pixels: Pixels | None) -> Tensor:
    return map if pixels is None else map[pixels]


def _rows(map: Tensor, pixels: Pixels | None) -> Tensor:
    return _some(map, pixels).reshape(-1, map.shape[3])


def _met(place: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice] | None:
    """Which inputs a place of the kernel meets, and at which outputs."""
    first = place * dilation - padding
    low = max(0, -(first // stride))
    high = min(outputs - 1, (size - 1 - first) // stride)
    if low > high:
        return None
    return slice(low * stride + first, high * stride + first + 1, stride), slice(low, high + 1)


class _SmallMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, size: Pair, *shape: Pair
    ) -> Tensor:
        if groups == 1:
            weight = weight.contiguous(memory_format=torch.channels_last)  # once, and not in each product
        ctx.save_for_backward(x, weight)
        stride, padding, dilation = shape
        pixels, alone = size[0] * size[1], weight[0, 0].numel() == 1
        ctx.groups, ctx.shape = groups, shape
        ctx.products = groups == 1 and (pixels <= TINY or (alone and (pixels <= SMALL or stride != (1, 1))))
        if groups > 1 or pixels > TINY:
            return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        output = convolved(x, weight, size, *shape)
        return output if bias is None else output + bias[:, None, None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.shape
        to_x = to_weight = None
        if ctx.needs_input_grad[0] and ctx.products:
            to_x = input_gradient(x, grad, weight, stride, padding, dilation)
        elif ctx.needs_input_grad[0]:
            mask = (True, False, False)
            to_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, (0, 0), ctx.groups, mask
            )[0]
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(x, grad, weight.shape, stride, padding, dilation)
        return to_x, to_weight, grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, *(None,) * 5


class SmallMaps(TorchFunctionMode):
    """Within it, `conv2d` on small maps learns by products."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (F.conv2d, torch.conv2d) and (given := _taken(*args, **(kwargs or {}))) is not None:
            return _SmallMap.apply(*given)
        return function(*args, **(kwargs or {}))


def _taken(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Any, ...] | None:
    """The arguments of `_SmallMap`, if this convolution is one for it."""
    plain = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    learns = weight.requires_grad and torch.is_grad_enabled()
    if not plain or not learns or not is_simple(input, weight, padding, groups) or input.dim() != 4:
        return None
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    height, width = (
        (input.shape[i + 2] + 2 * padding[i] - dilation[i] * (weight.shape[i + 2] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    )
    dense = POINTWISE if weight[0, 0].numel() == 1 else SMALL
    if height * width > (dense if groups == 1 else weight[0].numel()):
        return None
    return input, weight, bias, groups, (height, width), stride, padding, dilation


def is_simple(input: Tensor, weight: Tensor, padding: Any, groups: int) -> bool:
    """Whether it is a convolution for `weight_gradient`: dense or depthwise, its padding in numbers."""
    return not isinstance(padding, str) and (groups == 1 or groups == input.shape[1] == weight.shape[0])


def pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
