"""Small additions to a weight or beside a layer: residual adapters (Rebuffi et al.) and LoRA (Hu et al.)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.errors import TaskError
from bitgraft.methods.registry import Method, Options, is_number, register_method, uniform
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


def parallel(
    weight: Weight, tensor: Tensor, options: Options, rng: torch.Generator | None, before: Sequence[Transform]
) -> Parallel | None:
    odd = all(size % 2 for size in weight.kernel)
    return Parallel(weight, tensor.device) if _is_spatial(weight) and odd else None


def series(
    weight: Weight, tensor: Tensor, options: Options, rng: torch.Generator | None, before: Sequence[Transform]
) -> Series | None:
    return Series(weight, tensor.device) if _is_spatial(weight) else None


def _is_spatial(weight: Weight) -> bool:
    return any(size > 1 for size in weight.kernel)


@dataclass(frozen=True)
class LoraOptions(Options):
    norms: bool = False
    rank: int = 8
    alpha: float = 8.0
    """The update is scaled by alpha / rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise TaskError(f"rank={self.rank!r}: give a whole number from 1 on")
        if not is_number(self.alpha):
            raise TaskError(f"alpha={self.alpha!r}: give a number")


class LowRank(Transform):
    """W~ = W + (alpha / rank) · B A, with W's filters as rows."""

    def __init__(self, weight: Weight, scale: float, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.weight, self.scale = weight, scale
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        update = self.weight.from_filters(self.b @ self.a)
        return torch.add(widened(weight), update, alpha=self.scale).to(weight.dtype)


def low_rank(
    weight: Weight, tensor: Tensor, options: LoraOptions, rng: torch.Generator | None, before: Sequence[Transform]
) -> LowRank:
    inputs = weight.shape.numel() // weight.outputs
    rank = min(options.rank, weight.outputs, inputs)
    bound = 1 / math.sqrt(inputs)
    a = uniform((rank, inputs), -bound, bound, rng, tensor)
    b = tensor.new_zeros((weight.outputs, rank), dtype=torch.float32)
    return LowRank(weight, options.alpha / options.rank, a, b)


ADAPTERS_PARALLEL = register_method(
    Method(
        name="adapters-parallel",
        summary="a 1x1 convolution beside each larger one (residual adapters); own norm layers",
        equation="W~ = W + centre(A)",
        options=Options(),
        build=parallel,
    )
)
ADAPTERS_SERIES = register_method(
    Method(
        name="adapters-series",
        summary="a residual 1x1 convolution behind each larger one (residual adapters); own norm layers",
        equation="y~ = y + A·BN(y), y = W * x",
        options=Options(),
        build=series,
    )
)
ADAPTERS_JOINT = register_method(
    Method(
        name="adapters-joint",
        summary="series adapters, and the weights that tasks share learn along: tasks in turns, on a new backbone",
        equation="y~ = y + A·BN(y), y = W * x, W learned by all tasks",
        options=Options(),
        build=series,
        joint=True,
    )
)
LORA = register_method(
    Method(
        name="lora",
        summary="a low-rank update of each weight; norm layers frozen",
        equation="W~ = W + (alpha / r) · B A",
        options=LoraOptions(),
        build=low_rank,
    )
)
