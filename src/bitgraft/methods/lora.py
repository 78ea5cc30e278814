"""LoRA (Hu et al.): a low-rank update of each weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitgraft.methods.registry import Method, Options, is_number, register_method, require, uniform
from bitgraft.transforms.base import Transform, Weight, widened


@dataclass(frozen=True)
class LoraOptions(Options):
    norms: bool = False
    rank: int = 8
    alpha: float = 8.0
    """The update is scaled by alpha / rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        require(whole and self.rank >= 1, "rank", self.rank, "give a whole number from 1 on")
        require(is_number(self.alpha), "alpha", self.alpha, "give a number")


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


SUMMARY = "a low-rank update of each weight; norm layers frozen"

register_method(Method("lora", SUMMARY, "W~ = W + (alpha / r) · B A", LoraOptions(), low_rank))
