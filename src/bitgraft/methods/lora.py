"""LoRA (Hu et al.): a low-rank update of each weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitgraft.methods.registry import Method, Options, is_number, register_method, require, uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitgraft.transforms.base import Transform, Weight


@dataclass(frozen=True)
class LoraOptions(Options):
    norms: bool = False
    rank: int = 8
    alpha: float = 8.0
    """The update is scaled by alpha / rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        require(whole and self.rank >= 1, "rank", self.rank, "give a whole number of at least 1")
        require(is_number(self.alpha), "alpha", self.alpha, "give a number")


def low_rank(weight: Weight, tensor: Tensor, options: LoraOptions, rng: torch.Generator | None, *_: Any) -> Transform:
    import torch

    from bitgraft.transforms.low_rank import LowRank

    inputs = weight.shape.numel() // weight.outputs
    rank = min(options.rank, weight.outputs, inputs)
    bound = 1 / math.sqrt(inputs)
    a = uniform((rank, inputs), -bound, bound, rng, tensor)
    b = tensor.new_zeros((weight.outputs, rank), dtype=torch.float32)
    return LowRank(weight, options.alpha / options.rank, a, b)


SUMMARY = "a low-rank update of each weight; norm layers frozen"

register_method(Method("lora", SUMMARY, "W~ = W + (alpha / r) · B A", LoraOptions(), low_rank))
