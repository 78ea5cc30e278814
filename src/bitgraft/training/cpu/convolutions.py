"""Convolutions that learn on a CPU: the fastest way for each, by its kernel and its maps.

oneDNN's gradients are slow on small maps, for the weights above all: half of a step of EfficientNet-Lite0 at 64 px
would go into its depthwise layers (`make bench ROWS=convolutions`), and much of one of ResNet-50 into its last three
dense ones. Those go by products. Kernels of 3 x 3, where half of a ResNet's arithmetic is, go by tiles. The rest is
PyTorch's.
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

SMALL, POINTWISE, TINY = 16, 256, 4
"""Pixels of the largest maps for which products are the faster way: to the gradient of a dense kernel, to that of a
kernel of one place, and to what a convolution gives and the gradient of what it takes in."""
POINTS, LARGE = 64, 1 << 17
"""And pixels of the largest maps, and weights of the smallest kernel of one place, for which one product is the faster
way to all three: oneDNN would copy the kernel first, and it has few pixels to make up for that."""


@dataclass(frozen=True)
class _Shape:
    """A convolution but for its tensors, and the maps that it gives."""

    size: Pair
    kernel: Pair
    weights: int
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    tiled: bool

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def is_point(self) -> bool:
        return self.groups == 1 and self.kernel == (1, 1)

    @property
    def learns_fast(self) -> bool:
        """Whether there is a faster way than PyTorch's to the gradient of the kernel."""
        if self.groups > 1:
            return self.pixels <= self.kernel[0] * self.kernel[1]
        return self.tiled or self.pixels <= (POINTWISE if self.is_point else SMALL)

    @property
    def gives_products(self) -> bool:
        """Whether products are the faster way to what it gives."""
        large = self.is_point and self.weights >= LARGE
        return self.groups == 1 and self.pixels <= (POINTS if large else TINY)

    @property
    def takes_products(self) -> bool:
        """Whether they are to the gradient of what it takes in."""
        return self.gives_products or (self.is_point and (self.pixels <= SMALL or self.stride != (1, 1)))

    @property
    def is_product(self) -> bool:
        """Whether one product is all there is to it: PyTorch's own gradients of that are the same."""
        return self.gives_products and self.is_point and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def steps(self) -> tuple[Pair, Pair, Pair]:
        return self.stride, self.padding, self.dilation


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
        if shape.groups == 1:
            weight = weight.contiguous(memory_format=torch.channels_last)  # once, and not in each product
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        if shape.tiled:
            output = winograd.convolved(x, weight, shape.size, shape.padding)
        elif shape.gives_products:
            output = products.convolved(x, weight, shape.size, *shape.steps)
        else:
            return torch.conv2d(x, weight, bias, *shape.steps, shape.groups)
        if bias is not None:
            output.add_(bias[:, None, None])
        return output.data  # no view, which nothing behind it could write to in place (ReLU)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shape: _Shape = ctx.shape
        x, weight = ctx.saved_tensors
        needed: tuple[bool, ...] = ctx.needs_input_grad
        to_x = to_weight = None
        if shape.tiled:
            to_x, to_weight = winograd.gradients(x, grad, weight, shape.padding, needed[0])
        elif needed[0] and shape.takes_products:
            to_x = products.input_gradient(x, grad, weight, *shape.steps)
        elif needed[0]:
            mask = (True, False, False)
            to_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, *shape.steps, False, (0, 0), shape.groups, mask
            )[0]
        if needed[1] and to_weight is None:
            to_weight = products.weight_gradient(x, grad, weight.shape, *shape.steps)
        return to_x, to_weight, grad.sum((0, 2, 3)) if needed[2] else None, None


class Convolutions(TorchFunctionMode):
    """Within it, each `conv2d` that learns does so in the fastest way."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (F.conv2d, torch.conv2d) and (given := _taken(*args, **(kwargs or {}))) is not None:
            x, weight, bias, shape = given
            if shape.is_product:
                return F.linear(x.permute(0, 2, 3, 1), weight.flatten(1), bias).permute(0, 3, 1, 2)
            return _Convolution.apply(*given)
        return function(*args, **(kwargs or {}))


def _taken(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, _Shape] | None:
    """The arguments of `_Convolution`, if this convolution is one for it."""
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
    still = groups == 1 and stride == (1, 1) and dilation == (1, 1)
    tiled = still and winograd.suits(input, weight.shape, (height, width))
    shape = _Shape((height, width), kernel, weight.numel(), stride, padding, dilation, groups, tiled)
    return (input, weight, bias, shape) if shape.learns_fast else None


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
