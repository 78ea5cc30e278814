"""The transforms of methods without masks: residual adapters, combinations of filters, and LoRA."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitgraft.transforms.base import Transform, Weight, strided_like, widened

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Parallel(Transform):
    """W~ = W + centre(A): a parallel 1x1 convolution A, folded into the centre of the kernel (Rebuffi et al.)."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.padding = [size // 2 for size in reversed(weight.kernel) for _ in range(2)]
        self.a = nn.Parameter(torch.zeros(*weight.shape[:2], *(1 for _ in weight.kernel), device=device))

    def forward(self, weight: Tensor) -> Tensor:
        return (widened(weight) + F.pad(self.a, self.padding)).to(weight.dtype)


class SeriesTail(nn.Module):
    """y + A·BN(y), between a convolution and the norm layer after it."""

    def __init__(self, channels: int, dimensions: int, device: torch.device) -> None:
        super().__init__()
        self.norm = NORM[dimensions](channels, device=device)
        self.a = CONV[dimensions](channels, channels, 1, bias=False, device=device)
        nn.init.zeros_(self.a.weight)

    def forward(self, y: Tensor) -> Tensor:
        adapted: Tensor = y + self.a(self.norm(y.float()))  # the adapter is always in float32
        return adapted.to(y.dtype)


class Series(Transform):
    """W~ = W, with a residual adapter on the layer's output (Rebuffi et al.)."""

    tail: nn.Module

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.tail = SeriesTail(weight.outputs, len(weight.kernel), device)

    def forward(self, weight: Tensor) -> Tensor:
        return weight


class Recombined(Transform):
    """W~ = P · W, with W's filters as rows and a square P that starts as the identity (Rosenfeld and Tsotsos)."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.weight = weight
        self.p = nn.Parameter(torch.eye(weight.outputs, device=device))

    def forward(self, weight: Tensor) -> Tensor:
        filters = self.weight.filters(widened(weight))
        mixed = self.weight.from_filters(self.p.to(filters.dtype) @ filters)
        return strided_like(weight, mixed).to(weight.dtype)


class LowRank(Transform):
    """W~ = W + (alpha / rank) · B A, with W's filters as rows (LoRA, Hu et al.)."""

    def __init__(self, weight: Weight, scale: float, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.weight, self.scale = weight, scale
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        update = self.weight.from_filters(self.b @ self.a)
        return torch.add(widened(weight), update, alpha=self.scale).to(weight.dtype)
