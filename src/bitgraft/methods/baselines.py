"""The methods without masks: a head, norm layers or a whole copy; residual adapters, combinations of filters, LoRA."""

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


def parallel(weight: Weight, tensor: Tensor, *_: Any) -> Transform | None:
    from bitgraft.transforms.baselines import Parallel

    has_centre = any(size > 1 for size in weight.kernel) and all(size % 2 for size in weight.kernel)
    return Parallel(weight, tensor.device) if has_centre else None


def series(weight: Weight, tensor: Tensor, *_: Any) -> Transform | None:
    from bitgraft.transforms.baselines import Series

    return Series(weight, tensor.device) if any(size > 1 for size in weight.kernel) else None


def recombined(weight: Weight, tensor: Tensor, *_: Any) -> Transform:
    from bitgraft.transforms.baselines import Recombined

    return Recombined(weight, tensor.device)


def low_rank(weight: Weight, tensor: Tensor, options: LoraOptions, rng: torch.Generator | None, *_: Any) -> Transform:
    from bitgraft.transforms.baselines import LowRank

    inputs = weight.shape.numel() // weight.outputs
    rank, bound = min(options.rank, weight.outputs, inputs), 1 / math.sqrt(inputs)
    a = uniform((rank, inputs), -bound, bound, rng, tensor)
    return LowRank(weight, options.alpha / options.rank, a, a.new_zeros(weight.outputs, rank))


HEAD = "the backbone as it is, with its own head (feature extractor)"
NORMS = "the backbone's weights as they are; own norm layers and head"
ALL = "every tensor trained (individual network)"
PARALLEL = "a 1x1 convolution in parallel with each larger one (residual adapters); own norm layers"
SERIES = "a residual 1x1 convolution after each larger one (residual adapters); own norm layers"
JOINT = "series adapters, with the shared weights trained on all tasks in turn; makes a new backbone"
DAN = "linear combinations of each layer's filters; own norm layers"
LORA = "a low-rank update of each weight; norm layers frozen"
TAIL = "y~ = y + A·BN(y), y = W * x"

register_method(Method("classifier", HEAD, "W~ = W", Options(norms=False)))
register_method(Method("norms", NORMS, "W~ = W", Options()))
register_method(Method("finetune", ALL, "W~ = W + D", Options(), owns_everything=True))
register_method(Method("adapters-parallel", PARALLEL, "W~ = W + centre(A)", Options(), parallel))
register_method(Method("adapters-series", SERIES, TAIL, Options(), series))
register_method(Method("adapters-joint", JOINT, f"{TAIL}, W learned by all tasks", Options(), series, joint=True))
register_method(Method("dan", DAN, "W~ = P · W", Options(), recombined))
register_method(Method("lora", LORA, "W~ = W + (alpha / r) · B A", LoraOptions(), low_rank))
