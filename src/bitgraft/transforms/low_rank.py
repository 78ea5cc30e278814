"""LoRA (Hu et al.): a low-rank update of a weight."""

import torch
from torch import Tensor, nn

from bitgraft.transforms.base import Transform, Weight, widened


class LowRank(Transform):
    """W~ = W + (alpha / rank) · B A, with W's filters as rows."""

    def __init__(self, weight: Weight, scale: float, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.weight, self.scale = weight, scale
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        update = self.weight.from_filters(self.b @ self.a)
        return torch.add(widened(weight), update, alpha=self.scale).to(weight.dtype)
