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
class _Shape:
    """The geometry of a convolution, and how to run it."""

    size: Pair
    """Of the output."""
    kernel: Pair
    weights: int
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    by_tiles: bool

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def is_pointwise(self) -> bool:
        return self.groups == 1 and self.kernel == (1, 1)

    @property
    def is_faster(self) -> bool:
        """Whether the weight gradient is faster than PyTorch's."""
        if self.groups > 1:
            return self.pixels <= self.kernel[0] * self.kernel[1]
        return self.by_tiles or self.pixels <= (POINTWISE if self.is_pointwise else SMALL)

    @property
    def output_by_products(self) -> bool:
        """Whether products are faster for the output."""
        large = self.is_pointwise and self.weights >= LARGE
        return self.groups == 1 and self.pixels <= (LARGE_POINTWISE if large else TINY)

    @property
    def input_gradient_by_products(self) -> bool:
        """Whether products are faster for the input gradient."""
        return self.output_by_products or (self.is_pointwise and (self.pixels <= SMALL or self.stride != (1, 1)))

    @property
    def is_linear(self) -> bool:
        """Whether it is a single product; PyTorch's own gradients of that are products as well."""
        return self.output_by_products and self.is_pointwise and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def geometry(self) -> tuple[Pair, Pair, Pair]:
        return self.stride, self.padding, self.dilation


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
        if shape.groups == 1:
            weight = weight.contiguous(memory_format=torch.channels_last)  # once, not in each product
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        if shape.by_tiles:
            output = winograd.convolve(x, weight, shape.size, shape.padding)
        elif shape.output_by_products:
            output = products.convolve(x, weight, shape.size, *shape.geometry)
        else:
            return torch.conv2d(x, weight, bias, *shape.geometry, shape.groups)
        if bias is not None:
            output.add_(bias[:, None, None])
        return output.data  # not a view, so that an in-place ReLU may write to it

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape: _Shape = ctx.shape
        x, weight = ctx.saved_tensors
        needs_grad: tuple[bool, ...] = ctx.needs_input_grad
        grad_x = grad_weight = None
        if shape.by_tiles:
            grad_x, grad_weight = winograd.gradients(x, grad, weight, shape.padding, needs_grad[0])
        elif needs_grad[0] and shape.input_gradient_by_products:
            grad_x = products.input_gradient(x, grad, weight, *shape.geometry)
        elif needs_grad[0]:
            mask = (True, False, False)
            grad_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, *shape.geometry, False, (0, 0), shape.groups, mask
            )[0]
        if needs_grad[1] and grad_weight is None:
            grad_weight = products.weight_gradient(x, grad, weight.shape, *shape.geometry)
        return grad_x, grad_weight, grad.sum((0, 2, 3)) if needs_grad[2] else None, None


class Convolutions(TorchFunctionMode):
    """Within it, each `conv2d` with a trained weight uses the fastest algorithm."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (F.conv2d, torch.conv2d) and (given := _fast_arguments(*args, **(kwargs or {}))) is not None:
            x, weight, bias, shape = given
            if shape.is_linear:
                return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
            return _Convolution.apply(*given)
        return function(*args, **(kwargs or {}))


def _fast_arguments(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, _Shape] | None:
    """The arguments of `_Convolution`, or None if PyTorch is faster."""
    plain = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    learns = weight.requires_grad and torch.is_grad_enabled()
    dense_or_depthwise = groups == 1 or groups == input.shape[1] == weight.shape[0]
    if not plain or not learns or not dense_or_depthwise or isinstance(padding, str) or input.dim() != 4:
        return None
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    kernel = weight.shape[2], weight.shape[3]
    height, width = (
        (input.shape[i + 2] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    )
    unit_stride = groups == 1 and stride == (1, 1) and dilation == (1, 1)
    by_tiles = unit_stride and winograd.suits(input, weight.shape, (height, width))
    shape = _Shape((height, width), kernel, weight.numel(), stride, padding, dilation, groups, by_tiles)
    return (input, weight, bias, shape) if shape.is_faster else None


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
