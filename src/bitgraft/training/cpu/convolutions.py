"""The fastest algorithm for each convolution that is trained on a CPU.

oneDNN's gradients are slow on small maps, mostly those of weights: depthwise layers take half of a step of
EfficientNet-Lite0 at 64 px (`make bench ROWS=convolutions`), and the last three dense ones much of a step of ResNet-50.
These use `products`. 3 x 3 kernels, half of a ResNet's arithmetic, use `winograd`. The rest is left to PyTorch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bitgraft.training.cpu import products, winograd
from bitgraft.training.cpu.products import Pair

# products are faster up to this many output pixels:
SMALL, POINTWISE = 16, 256  # weight gradient of a dense and of a pointwise kernel
TINY = 4  # output and input gradient
LARGE, LARGE_POINTWISE = 1 << 17, 64  # the same for a pointwise kernel of LARGE weights, which oneDNN would copy first


@dataclass(frozen=True)
class _Plan:
    """How to run a convolution: which parts by tiles or products, and its geometry."""

    by_tiles: bool
    output_by_products: bool
    input_gradient_by_products: bool
    is_linear: bool
    """A single product; PyTorch's own gradients of that are products as well."""
    size: Pair
    """Of the output."""
    groups: int
    geometry: tuple[Pair, Pair, Pair]
    """Stride, padding and dilation."""


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        if plan.groups == 1:
            weight = weight.contiguous(memory_format=torch.channels_last)  # once, not in each product
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        if plan.by_tiles:
            output = winograd.convolve(x, weight, plan.size, plan.geometry[1])
        elif plan.output_by_products:
            output = products.convolve(x, weight, plan.size, *plan.geometry)
        else:
            return torch.conv2d(x, weight, bias, *plan.geometry, plan.groups)
        if bias is not None:
            output.add_(bias[:, None, None])
        return output.data  # not a view, so that an in-place ReLU may write to it

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x, weight = ctx.saved_tensors
        needs_grad: tuple[bool, ...] = ctx.needs_input_grad
        grad_x = grad_weight = None
        if plan.by_tiles:
            grad_x, grad_weight = winograd.gradients(x, grad, weight, plan.geometry[1], needs_grad[0])
        elif needs_grad[0] and plan.input_gradient_by_products:
            grad_x = products.input_gradient(x, grad, weight, *plan.geometry)
        elif needs_grad[0]:
            mask = (True, False, False)
            grad_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, *plan.geometry, False, (0, 0), plan.groups, mask
            )[0]
        if needs_grad[1] and grad_weight is None:
            grad_weight = products.weight_gradient(x, grad, weight.shape, *plan.geometry)
        return grad_x, grad_weight, grad.sum((0, 2, 3)) if needs_grad[2] else None, None


class Convolutions(TorchFunctionMode):
    """Within it, each `conv2d` with a trained weight uses the fastest algorithm."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (F.conv2d, torch.conv2d) and (given := _planned(*args, **(kwargs or {}))) is not None:
            x, weight, bias, plan = given
            if plan.is_linear:
                return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
            return _Convolution.apply(*given)
        return function(*args, **(kwargs or {}))


def _planned(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, _Plan] | None:
    """The arguments of `_Convolution`, or None if PyTorch's weight gradient is faster."""
    plain = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    learns = weight.requires_grad and torch.is_grad_enabled()
    dense, depthwise = groups == 1, groups == input.shape[1] == weight.shape[0]
    if not plain or not learns or not (dense or depthwise) or isinstance(padding, str) or input.dim() != 4:
        return None
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    kernel, unit_stride = (weight.shape[2], weight.shape[3]), stride == (1, 1)
    height, width = (
        (input.shape[i + 2] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    )
    pixels, pointwise = height * width, dense and kernel == (1, 1)
    by_tiles = dense and unit_stride and dilation == (1, 1) and winograd.suits(input, weight.shape, (height, width))
    if pixels > (kernel[0] * kernel[1] if not dense else POINTWISE if pointwise else SMALL) and not by_tiles:
        return None
    output = dense and pixels <= (LARGE_POINTWISE if pointwise and weight.numel() >= LARGE else TINY)
    input_gradient = output or (pointwise and (pixels <= SMALL or not unit_stride))
    is_linear = output and pointwise and unit_stride and padding == (0, 0)
    geometry = stride, padding, dilation
    plan = _Plan(by_tiles, output, input_gradient, is_linear, (height, width), groups, geometry)
    return input, weight, bias, plan


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
