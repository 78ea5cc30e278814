"""Depthwise convolutions that learn on a CPU, where their maps are no larger than their kernels.

For these oneDNN has no fast way to the weights' gradient: a step of EfficientNet-Lite0 at 64 px spends half of its time
on it (32 images, 1152 channels, maps of 2 x 2, a kernel of 5 x 5: 33 ms, against 0.6 here). Small images on a CPU are
what one tries a task with first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]


def weight_gradient(x: Tensor, grad: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """dE/dW of a depthwise convolution: for each place of the kernel, the sum over images and pixels of dE/dy times
    the input that it met there. Padding, which is zero, adds nothing and is left out."""
    inputs, grads = x.permute(0, 2, 3, 1), grad.permute(0, 2, 3, 1)
    out = grad.new_zeros(*kernel, x.shape[1])
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            rows = _met(i, x.shape[2], grad.shape[2], stride[0], padding[0], dilation[0])
            columns = _met(j, x.shape[3], grad.shape[3], stride[1], padding[1], dilation[1])
            if rows is not None and columns is not None:
                product = inputs[:, rows[0], columns[0]] * grads[:, rows[1], columns[1]]
                torch.sum(product, (0, 1, 2), out=out[i, j])
    return out.permute(2, 0, 1)[:, None]


def _met(place: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> tuple[slice, slice] | None:
    """Which inputs a place of the kernel meets, and at which outputs."""
    first = place * dilation - padding
    low = max(0, -(first // stride))
    high = min(outputs - 1, (size - 1 - first) // stride)
    if low > high:
        return None
    return slice(low * stride + first, high * stride + first + 1, stride), slice(low, high + 1)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *shape: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        stride, padding, dilation = shape
        return torch.conv2d(x, weight, bias, stride, padding, dilation, weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.shape
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            groups, mask = weight.shape[0], (True, False, False)
            to_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, (0, 0), groups, mask
            )[0]
        if ctx.needs_input_grad[1]:
            to_weight = weight_gradient(x, grad, tuple(weight.shape[2:]), stride, padding, dilation)
        return to_x, to_weight, grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None, None, None, None


class SmallMaps(TorchFunctionMode):
    """Within it, `conv2d` learns depthwise kernels on small maps by `weight_gradient`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (F.conv2d, torch.conv2d) and (given := _taken(*args, **(kwargs or {}))) is not None:
            return _Depthwise.apply(*given)
        return function(*args, **(kwargs or {}))


def _taken(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Any, ...] | None:
    """The arguments of `_Depthwise`, if this convolution is one for it."""
    channels = weight.shape[0]
    if not groups == channels == input.shape[1] or groups == 1 or isinstance(padding, str) or input.dim() != 4:
        return None
    plain = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    reach = dilation[1] * (weight.shape[3] - 1)
    width = (input.shape[3] + 2 * padding[1] - reach - 1) // stride[1] + 1
    if not plain or width > weight.shape[3] or not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    return input, weight, bias, stride, padding, dilation


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
