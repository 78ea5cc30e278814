"""Deep adaptation networks (Rosenfeld and Tsotsos): linear combinations of a layer's filters."""

import torch
from torch import Tensor, nn

from bitgraft.transforms.base import Transform, Weight, strided_like, widened


class Recombined(Transform):
    """W~ = P · W, with W's filters as rows and a square P that starts as the identity."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.weight = weight
        self.p = nn.Parameter(torch.eye(weight.outputs, device=device))

    def forward(self, weight: Tensor) -> Tensor:
        filters = self.weight.filters(widened(weight))
        mixed = self.weight.from_filters(self.p.to(filters.dtype) @ filters)
        return strided_like(weight, mixed).to(weight.dtype)
