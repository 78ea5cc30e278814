"""Convolutions that learn on a CPU, where their maps are small.

oneDNN's gradients are slow there, for the weights above all: half of a step of EfficientNet-Lite0 at 64 px would go
into its depthwise layers (1152 channels, maps of 2 x 2, a kernel of 5 x 5: 33 ms, against 0.6 here), and a tenth of one
of ResNet-50 into its last three dense ones (512 channels, maps of 2 x 2, 3 x 3: 34 ms, against 4). Small images on a
CPU are what one tries a task with first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]

SMALL = 16
"""Pixels of the largest map for which a matrix product for each place of a dense kernel is the faster way."""


def weight_gradient(x: Tensor, grad: Tensor, shape: torch.Size, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dW of a dense or depthwise convolution: for each place of the kernel, the sum over images and pixels of dE/dy
    times the input that it met there. Padding, which is zero, adds nothing and is left out."""
    inputs, grads = x.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1)
    out = grad.new_empty(*shape[2:], *shape[:2])
    for i in range(shape[2]):
        for j in range(shape[3]):
            rows = _met(i, x.shape[2], grad.shape[2], stride[0], padding[0], dilation[0])
            columns = _met(j, x.shape[3], grad.shape[3], stride[1], padding[1], dilation[1])
            if rows is None or columns is None:  # padding alone
                out[i, j] = 0
                continue
            before, after = inputs[:, rows[0], columns[0]], grads[:, rows[1], columns[1]]
            if x.shape[1] == shape[1]:
                torch.mm(_as_rows(after).t(), _as_rows(before), out=out[i, j])
            else:
                torch.sum(before * after, (0, 1, 2), out=out[i, j, :, 0])
    return out.permute(2, 3, 0, 1)


def _as_rows(pixels: Tensor) -> Tensor:
    return pixels.reshape(-1, pixels.shape[3])


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, *shape: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.shape = groups, shape
        stride, padding, dilation = shape
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.shape
        to_x = to_weight = None
        if ctx.needs_input_grad[0] and _is_product(weight, ctx.groups, stride, padding):
            to_x = (grad.permute(0, 2, 3, 1) @ weight.flatten(1)).permute(0, 3, 1, 2)
        elif ctx.needs_input_grad[0]:
            mask = (True, False, False)
            to_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, (0, 0), ctx.groups, mask
            )[0]
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(x, grad, weight.shape, stride, padding, dilation)
        return to_x, to_weight, grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None, None, None, None


class SmallMaps(TorchFunctionMode):
    """Within it, `conv2d` on small maps learns by `weight_gradient`."""

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
    if height * width > (SMALL if groups == 1 else weight[0].numel()):
        return None
    return input, weight, bias, groups, stride, padding, dilation


def _is_product(weight: Tensor, groups: int, stride: Pair, padding: Pair) -> bool:
    """Each pixel by itself."""
    return groups == 1 and tuple(weight.shape[2:]) == stride == (1, 1) and padding == (0, 0)


def is_simple(input: Tensor, weight: Tensor, padding: Any, groups: int) -> bool:
    """Whether it is a convolution for `weight_gradient`: dense or depthwise, its padding in numbers."""
    return not isinstance(padding, str) and (groups == 1 or groups == input.shape[1] == weight.shape[0])


def pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
