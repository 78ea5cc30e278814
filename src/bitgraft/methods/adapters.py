"""Residual adapters (Rebuffi et al.): a 1x1 convolution beside or behind each larger one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.methods.registry import Method, Options, register_method
from bitgraft.transforms.base import Transform, Weight, widened

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Parallel(Transform):
    """W~ = W + centre(A): a 1x1 convolution beside a larger one, folded into its middle tap."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.padding = [size // 2 for size in reversed(weight.kernel) for _ in range(2)]
        self.a = nn.Parameter(torch.zeros(*weight.shape[:2], *(1 for _ in weight.kernel), device=device))

    def forward(self, weight: Tensor) -> Tensor:
        return (widened(weight) + F.pad(self.a, self.padding)).to(weight.dtype)


class SeriesTail(nn.Module):
    """y + A·BN(y), behind a convolution and before its own norm."""

    def __init__(self, channels: int, dimensions: int, device: torch.device) -> None:
        super().__init__()
        self.norm = NORM[dimensions](channels, device=device)
        self.a = CONV[dimensions](channels, channels, 1, bias=False, device=device)
        nn.init.zeros_(self.a.weight)

    def forward(self, y: Tensor) -> Tensor:
        adapted: Tensor = y + self.a(self.norm(y.float()))  # the adapter is in float32, whatever y is in
        return adapted.to(y.dtype)


class Series(Transform):
    """The weight stays; a residual adapter follows the layer."""

    tail: nn.Module

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.tail = SeriesTail(weight.outputs, len(weight.kernel), device)

    def forward(self, weight: Tensor) -> Tensor:
        return weight


def parallel(weight: Weight, tensor: Tensor, *_: Any) -> Parallel | None:
    has_middle = all(size % 2 for size in weight.kernel)
    return Parallel(weight, tensor.device) if _is_spatial(weight) and has_middle else None


def series(weight: Weight, tensor: Tensor, *_: Any) -> Series | None:
    return Series(weight, tensor.device) if _is_spatial(weight) else None


def _is_spatial(weight: Weight) -> bool:
    return any(size > 1 for size in weight.kernel)


BESIDE = "a 1x1 convolution beside each larger one (residual adapters); own norm layers"
BEHIND = "a residual 1x1 convolution behind each larger one (residual adapters); own norm layers"
JOINT = "series adapters, and the weights that tasks share learn along: tasks in turns, on a new backbone"
EQUATION = "y~ = y + A·BN(y), y = W * x"

register_method(Method("adapters-parallel", BESIDE, "W~ = W + centre(A)", Options(), parallel))
register_method(Method("adapters-series", BEHIND, EQUATION, Options(), series))
register_method(Method("adapters-joint", JOINT, f"{EQUATION}, W learned by all tasks", Options(), series, joint=True))
