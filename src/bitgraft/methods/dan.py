"""Deep adaptation networks (Rosenfeld and Tsotsos): a task recombines each layer's filters."""

from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.methods.registry import Method, Options, register_method
from bitgraft.transforms.base import Transform, Weight, strided_like, widened


class Recombined(Transform):
    """W~ = P · W, with W's filters as rows and P square, starting as the identity."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        self.weight = weight
        self.p = nn.Parameter(torch.eye(weight.outputs, device=device))

    def forward(self, weight: Tensor) -> Tensor:
        filters = self.weight.filters(widened(weight))
        mixed = self.weight.from_filters(self.p.to(filters.dtype) @ filters)
        return strided_like(weight, mixed).to(weight.dtype)


def recombined(weight: Weight, tensor: Tensor, *_: Any) -> Recombined:
    return Recombined(weight, tensor.device)


register_method(
    Method("dan", "each layer's filters recombined linearly; own norm layers", "W~ = P · W", Options(), recombined)
)
